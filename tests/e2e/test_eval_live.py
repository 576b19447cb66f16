"""A checkpoint evaluated without its run gives the figures that the run gave for that version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_last_checkpoint_has_the_figures_of_the_last_evaluation(
    launch: Callable[..., LiveRun], tmp_path: Path
) -> None:
    settings = [
        "generation.engine=hf",
        "buffer.groups_per_step=4",
        "generation.group_size=4",
        "num_steps=1",
    ]
    settings += [
        "evaluation.every_steps=1",
        "evaluation.num_prompts=48",
        "evaluation.num_samples=2",
    ]
    run = launch("conf=grpo_code", *settings)
    assert run.process.wait(300) == 0, run.terminal
    in_run = run.rows[-1]["scalars"] if "scalars" in run.rows[-1] else run.rows[-1]
    command = [str(Path(sys.executable).with_name("async-rl")), "eval", str(run.run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    alone = json.loads(done.stdout)
    assert (alone["version"], alone["failed_prompts"], alone["eval/num_samples"]) == (1, 0, 96)
    assert alone["eval/version_mean"] == 1
    for name in (
        "eval/greedy_pass",
        "eval/pass_at_1",
        "eval/pass_at_k",
        "eval/maj_at_k",
        "eval/reward_mean",
    ):
        error = (alone[f"{name}_error"] ** 2 + in_run[f"{name}_error"] ** 2) ** 0.5
        assert abs(alone[name] - in_run[name]) <= 2 * error, name
    assert abs(alone["eval/greedy_pass"] - in_run["eval/greedy_pass"]) <= 2 / 48, (
        "greedy answers differ by rounding at most"
    )
    assert in_run["eval/greedy_pass"] > 0
