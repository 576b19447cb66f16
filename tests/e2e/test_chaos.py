"""Every role is killed while the real loop trains; nothing is lost and nothing is trained twice.
The long form is chaos.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from chaos import ORDER, Chaos, Summary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "conf=grpo_code",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
)


def survive(
    directory: Path, settings: Sequence[str], faults: Sequence[str], *, num_steps: int | None = None
) -> Summary:
    """num_steps: None = a few more than the faults take."""
    chaos = Chaos(directory, (*SMALL, *settings, f"num_steps={num_steps or 100_000}"), seed=1)
    try:
        chaos.run.until(lambda: chaos.run.step >= 1, "step 1")
        for fault in faults:
            assert chaos.strike(fault), f"the run ended before {fault}:\n{chaos.run.terminal}"
        num_steps = num_steps or chaos.wind_up(8)
        summary = chaos.finish(timeout_s=600)
        assert summary.exit_code == 0, chaos.run.terminal
    finally:
        chaos.run.end()
    assert summary.problems == []
    assert (summary.num_steps, summary.steps) == (num_steps, list(range(1, num_steps + 1)))
    assert (summary.left_running, summary.left_in_shared_memory) == ([], [])
    return summary


def test_a_run_survives_every_fault(tmp_path: Path) -> None:
    summary = survive(
        tmp_path, ["generation.engine=hf"], [fault for fault in ORDER if fault != "supervisor"]
    )
    assert set(summary.kills) == set(ORDER)
    assert summary.num_undone_steps > 0


def test_a_run_with_vllm_survives_a_killed_generator_and_a_killed_learner(tmp_path: Path) -> None:
    survive(tmp_path, ["generators.count=1"], ["generator in a push", "learner"], num_steps=50)
