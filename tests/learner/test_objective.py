"""From groups to targets: which tokens are rewarded with what, by hand."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_support import make_config, make_groups

from async_rl.algorithms.parts import Across
from async_rl.batching.batch import Batch, collate_part, whole
from async_rl.config.run import RunConfig
from async_rl.core.errors import StalenessError
from async_rl.core.types import Group, Score, StepScore, Trajectory
from async_rl.learner.models import PolicyOutput, Values
from async_rl.learner.objective import Rewards, Targets, compute_targets, trained_mask
from async_rl.learner.objective_state import Moments, ObjectiveState

CPU = torch.device("cpu")


def group_of(
    rewards: Sequence[float],
    *,
    truncated: Sequence[bool] = (False, False),
    length: int = 3,
    steps: Sequence[tuple[StepScore, ...]] = ((), ()),
) -> Group:
    """Answers of `length` tokens to one prompt."""
    (template,) = make_groups(num_groups=1, size=1)
    is_written = np.arange(2 + length) >= 2
    trajectories = [
        Trajectory(
            token_ids=np.arange(2 + length, dtype=np.int32),
            prompt_length=2,
            loss_mask=is_written,
            behavior_logprobs=np.zeros(2 + length, np.float32),
            versions=np.where(is_written, 0, -1).astype(np.int32),
            is_truncated=truncated[i],
            score=Score(reward=reward, parts={}, verdicts=(), latency_s=0.0, steps=steps[i]),
        )
        for i, reward in enumerate(rewards)
    ]
    return msgspec.structs.replace(template, trajectories=trajectories)


def targets_of(
    config: RunConfig, batch: Batch, moments: Moments | None = None, **fields: Any
) -> Targets:
    mask = trained_mask(batch, version=0, config=config)
    nothing, reference = torch.zeros(batch.num_tokens), config.algorithm.reference
    return compute_targets(
        batch,
        mask,
        PolicyOutput(nothing, nothing, None, None, None)._replace(**fields),
        config=config,
        kl_coef=0.0 if reference is None else reference.coef,
        moments=moments or Moments(),
    )


def by_token(config: RunConfig, group: Group, **fields: torch.Tensor) -> list[list[float]]:
    """Advantages of each answer's tokens."""
    batch = collate_part(whole([group]), device=CPU)
    return batch.rows(targets_of(config, batch, **fields).advantages).tolist()


RETURNS = ("algorithm.advantage=reinforce_plus_plus",)
"""The advantage of a token is then the sum of the rewards from it on."""


@pytest.mark.proves("algorithm.truncated")
@pytest.mark.covers("mask_no_eos_with_zero")
def test_the_reward_of_a_truncated_sample_is_0_after_scaling_and_its_kl_stays() -> None:
    group = group_of([1.0, 1.0], truncated=[False, True])
    knobs = ("reward.bias=0.5", "reward.scale=2", "algorithm.kl.coef=0.5", "algorithm.kl=reward")
    ref = torch.tensor([0.0, 0.0, -2.0] * 2)
    for more, of_truncated in (((), 0.0), ((ZEROED,), -1.0)):
        config = make_config("grpo_code", *RETURNS, *knobs, *more)
        expected = [[0.0] * 3, [of_truncated] * 3]
        assert by_token(config, group, ref_logprobs=ref) == expected


STEPS = (StepScore(end_tokens=1, reward=0.25), StepScore(end_tokens=3, reward=1.0))
DENSE = (*RETURNS, "reward.mode=fraction")
LONG = group_of([1.0], length=9)
"""Of a limit of 12 tokens with a buffer of 4: a quarter into the buffer."""
OVERLONG = ("reward.overlong_tokens=4", "reward.overlong_penalty=2.0")
SCORED = group_of([1.0], steps=[STEPS])
CUT = group_of([1.0], truncated=[True], steps=[STEPS])
PAIR = group_of([1.0, 0.0], steps=[STEPS, (StepScore(end_tokens=2, reward=0.0),)])
ABOVE = ("algorithm.advantage=dr_grpo", "reward.placement=step_deltas", "reward.fail_reward=-1")
BASELINE = ("algorithm.advantage=reinforce_plus_plus_baseline",)
ZEROED = "algorithm.truncated=zero_reward"
WITH_GREEDY = msgspec.structs.replace(
    group_of([1.0, 0.0]), baseline=group_of([1.0], truncated=[True]).trajectories[0]
)


@pytest.mark.covers("use_dense_reward, reward_delta", "rw_type, use_dense_reward", "reward_delta")
@pytest.mark.parametrize(
    ("group", "knobs", "expected"),
    [
        # The penalty comes after the scale.
        (LONG, (*RETURNS, "reward.scale=3"), [[3.0] * 9]),
        (LONG, (*RETURNS, "reward.scale=3", *OVERLONG), [[2.5] * 9]),
        (SCORED, (*DENSE, "reward.placement=end"), [[1.0, 1.0, 1.0]]),
        (SCORED, (*DENSE, "reward.placement=steps"), [[1.25, 1.0, 1.0]]),
        (SCORED, (*DENSE, "reward.placement=step_deltas"), [[1.0, 0.75, 0.75]]),
        (CUT, (*DENSE, "reward.placement=steps", ZEROED), [[0.0] * 3]),
        # The totals of group estimators: 1 - (-1) = 2 and 0 - (-1) = 1.
        (PAIR, (*DENSE, *ABOVE), [[0.5] * 3, [-0.5] * 3]),
        (group_of([1.0, 0.0]), RETURNS, [[1.0] * 3, [0.0] * 3]),
        (group_of([1.0, 0.0]), BASELINE, [[0.5] * 3, [-0.5] * 3]),
        # The greedy answer is shaped like any other: its truncated reward is 0.
        (WITH_GREEDY, ("algorithm=remax", "reward.scale=2"), [[0.0] * 3, [-2.0] * 3]),
        (WITH_GREEDY, ("algorithm=remax", ZEROED), [[1.0] * 3, [0.0] * 3]),
    ],
)
def test_advantages_by_hand(
    group: Group, knobs: tuple[str, ...], expected: list[list[float]]
) -> None:
    assert by_token(make_config("grpo_code", *knobs), group) == expected


@pytest.mark.proves("algorithm.normalize_advantages")
@pytest.mark.covers("adv_norm, group_adv_norm")
def test_advantages_are_normalized_over_the_batch_or_over_each_group() -> None:
    groups = [group_of([1.0, 0.0]), group_of([10.0, 0.0])]
    batch = collate_part(whole(groups), device=CPU)

    def sequences(how: str) -> list[float]:
        config = make_config("grpo_code", *RETURNS, f"algorithm.normalize_advantages={how}")
        return batch.rows(targets_of(config, batch).advantages)[:, 0].tolist()

    assert sequences("none") == [1.0, 0.0, 10.0, 0.0]
    assert sequences("group") == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-4)
    rewards = np.array([1.0, 0.0, 10.0, 0.0])
    assert sequences("batch") == pytest.approx((rewards - rewards.mean()) / rewards.std(), abs=1e-4)


CRITIC = ("algorithm.normalize_advantages=none", "algorithm.kl=none")


def test_gae_sees_values_in_units_of_the_reward() -> None:
    config = make_config("ppo_code", *CRITIC, "algorithm.truncated=bootstrap")
    batch = collate_part(whole([group_of([1.0], truncated=[True])]), device=CPU)
    found = targets_of(
        config,
        batch,
        Moments(1.0, 5.0, 1.0),
        values=Values(torch.full((3,), 0.5), torch.tensor([1.0])),
    )
    assert found.advantages.tolist() == [1.0, 1.0, 1.0]  # (1 * 2 + 1) - (0.5 * 2 + 1)
    assert found.returns is not None
    assert found.returns.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.proves("algorithm.truncated")
@pytest.mark.parametrize(
    ("choice", "truncated_return"), [("train", 1.0), ("zero_reward", 0.0), ("bootstrap", 7.0)]
)
def test_the_value_after_the_end_counts_only_for_a_response_without_a_score(
    choice: str, truncated_return: float
) -> None:
    knobs = (*CRITIC, f"algorithm.truncated={choice}")
    batch = collate_part(whole([group_of([1.0, 1.0], truncated=[False, True])]), device=CPU)
    found = targets_of(
        make_config("ppo_code", *knobs),
        batch,
        values=Values(torch.zeros(6), torch.tensor([7.0, 7.0])),
    )
    assert found.returns is not None
    assert found.returns.tolist() == [1.0] * 3 + [truncated_return] * 3


@pytest.mark.proves("algorithm.advantage.critic.value_norm")
def test_the_critic_learns_returns_in_units_of_those_seen_so_far() -> None:
    returns, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])
    for norm, expected in (("none", [1.0, 3.0, 99.0]), ("ma", [-1.0, 1.0, 5.0])):
        config = make_config("ppo_code", f"algorithm.advantage.critic.value_norm={norm}")
        _, found = ObjectiveState(config.algorithm).observe(returns, mask)
        assert found.tolist() == pytest.approx(expected)


def rules(*knobs: str) -> Rewards:
    return Rewards(make_config("grpo_code", *knobs, "data.max_response_tokens=100"))


def test_rewards_are_shifted_scaled_and_clipped_by_hand() -> None:
    found = rules("reward.bias=0.5", "reward.scale=4", "reward.clip=1.5").scaled(
        torch.tensor([0.0, 0.5, 0.75, 1.0])
    )
    assert found.tolist() == [-1.5, 0.0, 1.0, 1.5]


def test_the_penalty_rises_over_the_last_tokens_of_the_allowed_length() -> None:
    lengths = torch.tensor([0, 80, 85, 90, 100])
    found = rules("reward.overlong_tokens=20", "reward.overlong_penalty=2.0").overlong_penalty(
        lengths
    )
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0]


def test_a_token_that_another_rank_must_refuse_is_refused_by_this_one() -> None:
    """Otherwise the other rank would wait for it until the collective times out."""
    of_the_other = iter([0.0, 6.0])

    class Two(Across):
        def maximum(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp_min(next(of_the_other))

    batch = collate_part(whole(make_groups(version=9)), device=CPU, across=Two())
    config = make_config("grpo_code", "buffer.max_staleness_versions=2")
    with pytest.raises(StalenessError, match="a token is 6 versions old"):
        trained_mask(batch, version=9, config=config)
