"""A real run from Python, from its launch to its end, while the command line watches it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest
from warm_processes import run_command

import async_rl

SMALL = {
    "num_steps": 100_000,
    "generation": {"engine": "hf", "group_size": 4},
    "buffer.groups_per_step": 4,
    "evaluation.every_steps": 0,
    "recording": "full",
    "monitoring.tensorboard_port": None,
}


def command(*words: str) -> str:
    done = run_command(words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_is_launched_followed_scaled_read_and_stopped(tmp_path: Path) -> None:
    started_s = time.monotonic()
    run = async_rl.launch("grpo_code", {**SMALL, "output_dir": tmp_path, "run_name": "mine"})
    assert time.monotonic() - started_s < 20, "it returns without waiting for a process to serve"
    steps = run.steps()
    assert [next(steps)["step"] for _ in range(2)] == [1, 2]
    status = run.status()
    assert (status.state, status.is_running) == (async_rl.RunState.RUNNING, True)
    assert {member.role for member in status.members} >= {"learner", "buffer", "generator"}
    seen = json.loads(command("status", str(run.directory), "--json"))
    assert (seen["state"], seen["run_name"]) == ("running", "mine")
    pools = {pool.pool: pool for pool in run.scale(is_forced=True, generators=2)}
    assert pools["generators"].wanted == 2
    samples = run.rollouts(step=1)
    assert len(samples) == 16
    assert all(sample.prompt and sample.step == 1 for sample in samples)
    assert any(sample.response for sample in samples)
    failed = [sample for sample in samples if not sample.score.is_passed]
    assert [s.index for s in run.rollouts(step=1, failed=True)] == [s.index for s in failed]
    processes = [member.pid for member in status.members]
    ended = run.stop()
    assert (ended.state, ended.cause) == (async_rl.RunState.STOPPED, "")
    assert not any(psutil.pid_exists(pid) for pid in processes)
    assert "(stopped)" in command("status", str(run.directory))
    assert [step["step"] for step in steps][-1] == run.metrics()["step"][-1] >= 2
    again = async_rl.open_run(run.directory)
    assert again.config.buffer.groups_per_step == 4
    resumed_to = ended.step + 2
    resumed = async_rl.resume(again, {"num_steps": resumed_to, "generators.count": 1})
    with pytest.raises(async_rl.ConfigError, match="is running"):
        async_rl.resume(resumed.directory)
    assert resumed.wait(timeout_s=120).state is async_rl.RunState.FINISHED
    assert resumed.metrics()["step"][-1] == resumed.config.num_steps == resumed_to
