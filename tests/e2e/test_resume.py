"""`async-rl resume`: what a run that was killed goes on with, what it refuses, and that it ends as
if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e_support import SMALL, LiveRun, async_rl
from safetensors.torch import load_file
from typer.testing import CliRunner

from async_rl.launchers.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "checkpoint.every_steps=4",
)


def test_a_killed_run_goes_on_to_its_end_with_each_group_trained_once(launch: Launch) -> None:
    run = launch(*QUICK, "num_steps=400")
    run.until(lambda: run.step >= 6, "step 6")
    assert "is running" in refusal(run)
    run.kill_all()
    last = run.step + 8  # how far a killed run came is up to the machine

    said = refusal(run, "buffer.groups_per_step=8", "seed=3")
    assert "buffer.groups_per_step=8: was 4, and the planned batches have that many groups" in said
    assert "seed=3: was 0" in said

    resumed = launch(f"num_steps={last}", "learner.optimizer.lr=1e-4", resumes=True)
    assert resumed.wait() == 0, resumed.terminal
    assert "resuming with learner.optimizer.lr=0.0001 (was " in resumed.terminal
    assert f"resuming with num_steps={last} (was 400)" in resumed.terminal
    assert [row["step"] for row in resumed.rows] == list(range(1, last + 1))
    assert max(row["staleness/max_versions"] for row in resumed.rows) <= 2
    found = resumed.audit()
    assert (found["problems"], found["num_steps"]) == ([], last)
    assert resumed.processes() == []

    assert (
        f"num_steps={last}: the run has finished step {last}; give a larger num_steps to continue"
        in refusal(resumed)
    )


def refusal(run: LiveRun, *settings: str) -> str:
    """What a person reads who resumes the run."""
    done = async_rl("resume", str(run.run_dir), *settings)
    assert done.returncode == 2, done
    return done.stdout + done.stderr


def weights(run: LiveRun, target: Path) -> dict[str, torch.Tensor]:
    """The policy that the run ended with."""
    # In this process, which has imported torch.
    exported = CliRunner().invoke(app, ["export", str(run.run_dir), str(target)])
    assert exported.exit_code == 0, exported.output
    assert (target / "tokenizer.json").is_file()
    return load_file(target / "model.safetensors")


def test_a_synchronous_run_that_was_killed_twice_ends_with_the_same_weights_bit_for_bit(
    launch: Launch, tmp_path: Path
) -> None:
    exact = (
        *QUICK,
        "buffer.max_staleness_versions=0",
        "generation.max_concurrent_groups=1",
        "num_steps=9",
        "checkpoint.every_steps=2",
    )
    whole = launch(*exact, name="whole")
    assert whole.wait() == 0, whole.terminal
    broken = launch(*exact, name="broken")
    broken.until(lambda: broken.step >= 3, "step 3")
    broken.kill("learner-0")
    broken.until(lambda: broken.step >= 5, "step 5")
    broken.kill_all()
    resumed = launch(name="broken", resumes=True)
    assert resumed.wait() == 0, resumed.terminal
    assert resumed.audit()["problems"] == []
    one, two = (weights(run, tmp_path / "hf" / run.run_dir.name) for run in (whole, resumed))
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
