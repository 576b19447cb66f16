from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import GroupEstimator, gae, group_advantages, normalize_advantages


def group_oracle(rewards: list[float], counted: list[bool], estimator: str) -> list[float]:
    """One group, in plain loops."""
    kept = [r for r, c in zip(rewards, counted, strict=True) if c]
    n = len(kept)
    result = []
    for r, c in zip(rewards, counted, strict=True):
        if not c or n < 2:
            result.append(0.0)
            continue
        mean = sum(kept) / n
        if estimator == "grpo":
            result.append((r - mean) / (math.sqrt(sum((k - mean) ** 2 for k in kept) / (n - 1)) + 1e-6))
        elif estimator == "dr_grpo":
            result.append(r - mean)
        else:
            result.append(r - (sum(kept) - r) / (n - 1))
    return result


def gae_oracle(rewards, values, bootstrap, mask, gamma, lam):
    """From the definition: A_t = sum over k of (gamma lam)^k delta_{t+k}, over the unmasked tokens only."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[b, t]]
        after = [*(values[b, t] for t in kept[1:]), bootstrap[b]]
        deltas = [rewards[b, t] + gamma * v - values[b, t] for t, v in zip(kept, after, strict=True)] if kept else []
        for i, t in enumerate(kept):
            advantages[b, t] = sum((gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(kept)))
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_group_advantages_equal_the_loop(estimator: GroupEstimator, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, rng.integers(1, 5))
    group_index = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rewards, counts = rng.normal(size=len(group_index)), rng.random(len(group_index)) < 0.8
    found = group_advantages(
        torch.tensor(rewards),
        group_index=torch.tensor(group_index),
        num_groups=len(sizes),
        counts=torch.tensor(counts),
        estimator=estimator,
    )
    for g in range(len(sizes)):
        members = np.flatnonzero(group_index == g)
        expected = group_oracle(rewards[members].tolist(), counts[members].tolist(), estimator)
        np.testing.assert_allclose(found[members], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # mean 0.25, unbiased std 0.5
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_success_of_four_by_hand(estimator: GroupEstimator, expected: list[float]) -> None:
    found = group_advantages(
        torch.tensor([1.0, 0, 0, 0]),
        group_index=torch.zeros(4, dtype=torch.int64),
        num_groups=1,
        counts=torch.ones(4, dtype=torch.bool),
        estimator=estimator,
    )
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_group_whose_members_agree_has_no_advantage() -> None:
    found = group_advantages(
        torch.full((3,), 0.1),
        group_index=torch.zeros(3, dtype=torch.int64),
        num_groups=1,
        counts=torch.ones(3, dtype=torch.bool),
        estimator="rloo",
    )
    assert found.abs().max() < 1e-7


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 4)), int(rng.integers(0, 8)))
    rewards, values, mask = rng.normal(size=shape), rng.normal(size=shape), rng.random(shape) < 0.7
    bootstrap = rng.normal(size=shape[0])
    found = gae(
        torch.tensor(rewards),
        values=torch.tensor(values),
        bootstrap=torch.tensor(bootstrap),
        mask=torch.tensor(mask),
        gamma=gamma,
        lam=lam,
    )
    for tensor, expected in zip(found, gae_oracle(rewards, values, bootstrap, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(tensor, expected, rtol=1e-9, atol=1e-9)


def test_gae_by_hand_skips_the_tool_output_between_two_tokens() -> None:
    # gamma 0.5, lam 0.5.  Last token: delta = 1 + 0.5 * 0 - 0.5 = 0.5.  First: delta = 0 + 0.5 * 0.5 - 1 = -0.75, A = -0.75 + 0.25 * 0.5.
    advantages, returns = gae(
        torch.tensor([[0.0, 9.0, 1.0]]),
        values=torch.tensor([[1.0, 7.0, 0.5]]),
        bootstrap=torch.zeros(1),
        mask=torch.tensor([[True, False, True]]),
        gamma=0.5,
        lam=0.5,
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.625, 0.0, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.375, 0.0, 1.0]]))


def test_truncation_bootstraps_from_the_value_after_the_last_token() -> None:
    advantages, _ = gae(
        torch.tensor([[0.0], [0.0]]),
        values=torch.tensor([[1.0], [1.0]]),
        bootstrap=torch.tensor([0.0, 3.0]),
        mask=torch.ones(2, 1, dtype=torch.bool),
        gamma=1.0,
        lam=1.0,
    )
    assert advantages.squeeze(1).tolist() == [-1.0, 2.0]


def test_normalized_advantages_have_mean_0_and_std_1_over_unmasked_tokens() -> None:
    x, mask = torch.tensor([1.0, 3.0, 100.0, 5.0]), torch.tensor([True, True, False, True])
    found = normalize_advantages(x, mask=mask)
    scale = math.sqrt(8 / 3) + 1e-5
    torch.testing.assert_close(found, torch.tensor([-2 / scale, 0.0, 0.0, 2 / scale]))


def test_normalizing_nothing_gives_zeros() -> None:
    assert normalize_advantages(torch.ones(3), mask=torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]
