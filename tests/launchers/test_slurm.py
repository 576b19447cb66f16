"""A short training as a job of a real Slurm on this machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from slurm_cluster import SlurmCluster, missing

_ASYNC_RL = str(Path(sys.executable).with_name("async-rl"))
_SHORT = (
    *("num_steps=2", "generation.engine=hf", "buffer.groups_per_step=2"),
    *("evaluation.every_steps=0", "monitoring.tensorboard_port=null"),
)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(
    bool(missing()),
    reason=f"no Slurm here; lacks {', '.join(missing())} (apt-get install slurmctld slurmd munge)",
)
def test_a_run_is_checked_and_submitted_trains_in_steps_of_its_job_and_ends_the_job(
    tmp_path: Path,
) -> None:
    with SlurmCluster(tmp_path / "slurm") as slurm:
        done = launch(slurm, tmp_path, 'launcher.extra=["--partition=nowhere"]')
        assert done.returncode == 2
        assert "sbatch --test-only refuses the job" in done.stderr
        assert "invalid partition" in done.stderr
        # What Slurm would refuse is refused before the run exists.
        assert not (tmp_path / "run").exists()
        mine = (
            "generators.count=0",
            "generators.pools.mine={count:1,work:train,cpus_each:2,node_kind:fast}",
        )
        done = launch(slurm, tmp_path, "launcher.extra=--time=00:20:00", *mine)
        assert done.returncode == 0, done.stdout + done.stderr
        run_dir = tmp_path / "run"
        job = done.stdout.rpartition("run run is job ")[2].partition(":")[0]
        steps: set[str] = set()
        deadline_s = time.monotonic() + 200
        while slurm.run("squeue", "--noheader", f"--job={job}"):
            steps |= set(slurm.run("squeue", "--steps", "--noheader", "--format=%j").split())
            assert time.monotonic() < deadline_s, (run_dir / "logs" / "slurm.out").read_text()
            time.sleep(0.3)
        said = (run_dir / "logs" / "slurm.out").read_text()
        state = msgspec.json.decode((run_dir / "state.json").read_bytes())
        assert state["outcome"] == "finished", said
        assert {"buffer", "verifier-0", "generator-mine-0", "learner-0"} <= steps
        assert "step 2 of 2" in said


def launch(
    slurm: SlurmCluster, output_dir: Path, *settings: str
) -> "subprocess.CompletedProcess[str]":
    """`async-rl launch launcher=slurm`, as a person on the login node."""
    words = ["launch", "conf=grpo_code", "launcher=slurm", *_SHORT, *settings]
    command = [_ASYNC_RL, *words, f"output_dir={output_dir}", "run_name=run"]
    env = {**os.environ, **slurm.env, "COLUMNS": "140"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
