"""The same loop in other shapes: synchronous, more processes, PPO with a critic, step rewards."""

import itertools
from collections.abc import Callable

import pytest
from e2e_support import LiveRun

from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import rollouts
from async_rl.core.types import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "evaluation.every_steps=0",
    "num_steps=6",
)
# Kept, or the samples of the first step could be gone with the last one.
DENSE = ("reward.mode=fraction", "reward.fail_reward=-1", "recording=full")


def test_staleness_0_is_synchronous_on_the_same_path_and_ppo_with_critic_reports_its_value_model(
    launch: Launch,
) -> None:
    run = launch("conf=ppo_code", *QUICK, "buffer.max_staleness_versions=0")
    assert run.wait() == 0, run.terminal
    assert [row["staleness/max_versions"] for row in run.rows] == [0] * 6
    assert max(row["policy/kl_behavior_proximal"] for row in run.rows) < 1e-6
    assert all(row["value/loss"] > 0 and "policy/kl_reference" in row for row in run.rows)
    assert run.rows[-1]["value/loss"] < run.rows[0]["value/loss"]


def test_two_generators_and_two_learner_ranks_run_by_configuration_with_scores_of_steps(
    launch: Launch,
) -> None:
    pools = ("generators.count=2", "learner.ranks=2", "verifiers.count=2")
    run = launch("conf=grpo_code", *QUICK, *pools, *DENSE, "reward.placement=steps")
    samples_of_the_first_step(run)
    assert run.wait() == 0, run.terminal
    assert [row["step"] for row in run.rows] == list(range(1, 7))


def test_scores_of_steps_travel_from_the_verifier_to_the_update(launch: Launch) -> None:
    run = launch("conf=ppo_code", *QUICK, *DENSE, "reward.placement=step_deltas", "num_steps=500")
    samples = samples_of_the_first_step(run)
    # Critic and KL are 0 before the first update, so the return of a token is the sum of the
    # rewards ahead.
    ahead = []
    for t in samples:
        steps = [(-1.0, 0), *((step.reward, step.end_tokens) for step in t.score.steps)]
        gains = [(now - before, end) for (before, _), (now, end) in itertools.pairwise(steps)]
        ahead += [sum(gain for gain, end in gains if end > k) for k in range(t.response_length)]
    assert run.rows[0]["value/return_mean"] == pytest.approx(sum(ahead) / len(ahead), abs=1e-4)


def samples_of_the_first_step(run: LiveRun) -> list[Trajectory]:
    """Each has the scores of its steps."""
    run.until(lambda: run.step >= 2, "the second step")
    with reading(run.run_dir / STORE_FILE) as connection:
        found = rollouts(connection, step=1, most=4)
    samples = [sample for each in found for sample in each.group.trajectories]
    assert len(samples) == 16
    assert all(sample.score.steps for sample in samples)
    return samples
