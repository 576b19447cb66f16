"""The same loop in other shapes: synchronous, more processes, PPO with a critic."""

from collections.abc import Callable

import pytest
from e2e_support import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = ("generation.engine=hf", "buffer.groups_per_step=4", "generation.group_size=4", "evaluation.every_steps=0", "num_steps=6")


def test_staleness_0_is_synchronous_on_the_same_path(launch: Launch) -> None:
    run = launch("conf=grpo_code", *QUICK, "buffer.max_staleness_versions=0")
    assert run.wait() == 0, run.terminal
    assert [row["staleness/max_versions"] for row in run.rows] == [0] * 6
    assert max(row["policy/kl_behavior_proximal"] for row in run.rows) < 1e-6


def test_two_generators_and_two_learner_ranks_run_by_configuration(launch: Launch) -> None:
    run = launch("conf=grpo_code", *QUICK, "generators.count=2", "learner.ranks=2", "verifiers.count=2")
    assert run.wait() == 0, run.terminal
    assert [row["step"] for row in run.rows] == list(range(1, 7))


def test_ppo_with_critic_reports_its_value_model(launch: Launch) -> None:
    run = launch("conf=ppo_code", *QUICK)
    assert run.wait() == 0, run.terminal
    assert all(row["value/loss"] > 0 and "policy/kl_reference" in row for row in run.rows)
    assert run.rows[-1]["value/loss"] < run.rows[0]["value/loss"]
