from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import (
    GroupEstimator,
    group_advantages,
    normalize_advantages,
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
