"""Every role is killed while the real loop trains; nothing is lost and nothing is trained twice.
The long form is chaos.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "conf=grpo_code",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
)


def test_a_run_survives_the_death_of_each_role(tmp_path: Path) -> None:
    """Order and moments of faults are tested in tests/world; here real processes die."""
    chaos = Chaos(tmp_path, (*SMALL, "generators.count=1", "num_steps=100000"), seed=1)
    try:
        chaos.run.until(lambda: chaos.run.step >= 1, "step 1")
        for fault in ("generator in a push", "verifier", "buffer", "learner"):
            assert chaos.strike(fault), f"the run ended before {fault}:\n{chaos.run.terminal}"
        num_steps = chaos.wind_up(8)
        summary = chaos.finish(timeout_s=600)
        assert summary.exit_code == 0, chaos.run.terminal
    finally:
        chaos.run.end()
    assert summary.problems == []
    assert (summary.num_steps, summary.steps) == (num_steps, list(range(1, num_steps + 1)))
    assert (summary.left_running, summary.left_in_shared_memory) == ([], [])
    assert summary.num_undone_steps > 0
