import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import GroupEstimator, group_advantages, normalize_advantages
from async_rl.algorithms.parts import Parts


def group_oracle(
    returns: list[list[float]], counted: list[bool], estimator: str
) -> list[list[float]]:
    """One group, in plain loops: the returns of the calls of each sample."""
    kept = [own for own, c in zip(returns, counted, strict=True) if c]
    means = [sum(own) / len(own) for own in kept]
    n = len(kept)
    result = []
    for own, c in zip(returns, counted, strict=True):
        if not c or n < 2:
            result.append([0.0] * len(own))
            continue
        mean = sum(means) / n
        spreads = [sum((r - mean) ** 2 for r in other) / len(other) for other in kept]
        scale = math.sqrt(sum(spreads) / (n - 1)) + 1e-6 if estimator == "grpo" else 1.0
        if estimator == "rloo":
            mean = (sum(means) - sum(own) / len(own)) / (n - 1)
        result.append([(r - mean) / scale for r in own])
    return result


@pytest.mark.covers("adv_estimator")
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), most_calls=st.integers(1, 3))
def test_group_advantages_equal_the_loop(
    estimator: GroupEstimator, seed: int, most_calls: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 7, rng.integers(1, 5))
    group_index = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    counts = rng.random(len(group_index)) < 0.8
    returns = rng.normal(size=(len(group_index), most_calls))
    num_calls = rng.integers(1, most_calls + 1, len(group_index))
    found = group_advantages(
        torch.tensor(returns),
        calls=torch.arange(most_calls) < torch.tensor(num_calls)[:, None],
        groups=Parts(index=torch.tensor(group_index), count=len(sizes), mask=torch.tensor(counts)),
        estimator=estimator,
    )
    for g in range(len(sizes)):
        members = np.flatnonzero(group_index == g)
        own = [returns[member, : num_calls[member]].tolist() for member in members]
        expected = group_oracle(own, counts[members].tolist(), estimator)
        for member, advantages in zip(members, expected, strict=True):
            padded = [*advantages, *[0.0] * (most_calls - len(advantages))]
            np.testing.assert_allclose(found[member], padded, rtol=1e-9, atol=1e-9)


def test_normalized_advantages_have_mean_0_and_std_1_over_unmasked_tokens() -> None:
    x, mask = torch.tensor([1.0, 3.0, 100.0, 5.0]), torch.tensor([True, True, False, True])
    found = normalize_advantages(
        x, parts=Parts(index=torch.zeros(4, dtype=torch.int64), count=1, mask=mask)
    )
    scale = math.sqrt(8 / 3) + 1e-5
    torch.testing.assert_close(found, torch.tensor([-2 / scale, 0.0, 0.0, 2 / scale]))


def test_normalizing_nothing_gives_zeros() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert normalize_advantages(
        torch.ones(3), parts=Parts(index=nothing.long(), count=1, mask=nothing)
    ).tolist() == [0, 0, 0]
