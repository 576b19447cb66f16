from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import (
    GroupEstimator,
    gae,
    group_advantages,
    normalize_advantages,
    returns_to_go,
    vtrace,
)
from async_rl.algorithms.parts import Parts


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
            result.append(
                (r - mean) / (math.sqrt(sum((k - mean) ** 2 for k in kept) / (n - 1)) + 1e-6)
            )
        elif estimator == "dr_grpo":
            result.append(r - mean)
        else:
            result.append(r - (sum(kept) - r) / (n - 1))
    return result


def gae_oracle(rewards, values, bootstrap, mask, gamma, lam):
    """From the definition: A_t = sum over k of (gamma lam)^k delta_{t+k}, over the unmasked tokens
    only.
    """
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[b, t]]
        after = [*(values[b, t] for t in kept[1:]), bootstrap[b]]
        deltas = (
            [rewards[b, t] + gamma * v - values[b, t] for t, v in zip(kept, after, strict=True)]
            if kept
            else []
        )
        for i, t in enumerate(kept):
            advantages[b, t] = sum(
                (gamma * lam) ** (k - i) * deltas[k] for k in range(i, len(kept))
            )
            returns[b, t] = advantages[b, t] + values[b, t]
    return advantages, returns


@pytest.mark.covers("adv_estimator")
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
        groups=Parts(index=torch.tensor(group_index), count=len(sizes), mask=torch.tensor(counts)),
        estimator=estimator,
    )
    for g in range(len(sizes)):
        members = np.flatnonzero(group_index == g)
        expected = group_oracle(rewards[members].tolist(), counts[members].tolist(), estimator)
        np.testing.assert_allclose(found[members], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.covers("gamma, lam", "masks inside a response", "values of truncated responses")
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
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
    for tensor, expected in zip(
        found, gae_oracle(rewards, values, bootstrap, mask, gamma, lam), strict=True
    ):
        np.testing.assert_allclose(tensor, expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9]))
def test_returns_to_go_sum_the_rewards_ahead_over_unmasked_tokens(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 4)), int(rng.integers(0, 8)))
    rewards, mask = rng.normal(size=shape), rng.random(shape) < 0.7
    found = returns_to_go(torch.tensor(rewards), mask=torch.tensor(mask), gamma=gamma)
    expected = np.zeros(shape)
    for b in range(shape[0]):
        kept = [t for t in range(shape[1]) if mask[b, t]]
        for i, t in enumerate(kept):
            expected[b, t] = sum(gamma**k * rewards[b, later] for k, later in enumerate(kept[i:]))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def vtrace_oracle(rewards, values, bootstrap, mask, log_ratio, gamma, lam):
    """The sum of remark 1 of the paper: v_t = V_t + sum over k >= t of gamma^(k-t) (prod
    c_t..c_(k-1)) rho_k delta_k.
    """
    advantages, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    for b in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[b, t]]
        after = [*(values[b, t] for t in kept[1:]), bootstrap[b]]
        weights = [math.exp(log_ratio[b, t]) for t in kept]
        deltas = (
            [
                min(1.0, w) * (rewards[b, t] + gamma * v - values[b, t])
                for t, v, w in zip(kept, after, weights, strict=True)
            ]
            if kept
            else []
        )
        traced = []
        for i, t in enumerate(kept):
            total = values[b, t]
            for k in range(i, len(kept)):
                product = math.prod(lam * min(1.0, w) for w in weights[i:k])
                total += gamma ** (k - i) * product * deltas[k]
            traced.append(total)
            targets[b, t] = total
        for i, t in enumerate(kept):
            following = traced[i + 1] if i + 1 < len(kept) else bootstrap[b]
            advantages[b, t] = rewards[b, t] + gamma * following - values[b, t]
    return advantages, targets


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_vtrace_equals_its_definition(seed: int, gamma: float, lam: float) -> None:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 4)), int(rng.integers(0, 8)))
    rewards, values, log_ratio = rng.normal(size=(3, *shape))
    mask, bootstrap = rng.random(shape) < 0.7, rng.normal(size=shape[0])
    found = vtrace(
        torch.tensor(rewards),
        values=torch.tensor(values),
        bootstrap=torch.tensor(bootstrap),
        mask=torch.tensor(mask),
        log_ratio=torch.tensor(log_ratio),
        gamma=gamma,
        lam=lam,
    )
    expected = vtrace_oracle(rewards, values, bootstrap, mask, log_ratio, gamma, lam)
    for tensor, oracle in zip(found, expected, strict=True):
        np.testing.assert_allclose(tensor, oracle, rtol=1e-9, atol=1e-9)


def test_normalized_advantages_have_mean_0_and_std_1_over_unmasked_tokens() -> None:
    x, mask = torch.tensor([1.0, 3.0, 100.0, 5.0]), torch.tensor([True, True, False, True])
    found = normalize_advantages(
        x, parts=Parts(index=torch.zeros(4, dtype=torch.int64), count=1, mask=mask)
    )
    scale = math.sqrt(8 / 3) + 1e-5
    torch.testing.assert_close(found, torch.tensor([-2 / scale, 0.0, 0.0, 2 / scale]))


def test_each_part_is_normalized_by_itself() -> None:
    x, part = torch.tensor([1.0, 3.0, 10.0, 30.0, 5.0]), torch.tensor([0, 0, 1, 1, 2])
    found = normalize_advantages(
        x, parts=Parts(index=part, count=3, mask=torch.ones(5, dtype=torch.bool))
    )
    torch.testing.assert_close(
        found, torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0]), rtol=1e-4, atol=1e-4
    )


def test_normalizing_nothing_gives_zeros() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert normalize_advantages(
        torch.ones(3), parts=Parts(index=nothing.long(), count=1, mask=nothing)
    ).tolist() == [0, 0, 0]
