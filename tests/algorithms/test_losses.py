from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.losses import Aggregation, cispo_loss, clipped_loss, token_weights
from async_rl.algorithms.parts import Parts


def surrogate_oracle(
    log_ratio: float, advantage: float, weight: float, low: float, high: float, dual: float | None
) -> float:
    u = math.exp(log_ratio)
    s = min(u * advantage, min(max(u, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        s = max(s, dual * advantage)
    return -weight * s


@pytest.mark.covers("clip_ratio, eps_clip")
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), dual=st.sampled_from([None, 3.0]))
def test_clipped_loss_equals_the_formula_token_by_token(seed: int, dual: float | None) -> None:
    rng = np.random.default_rng(seed)
    log_ratio, advantages = rng.normal(size=(2, 20)) * 1.5
    weights = rng.uniform(0, 2, 20)
    loss, low, high = clipped_loss(
        torch.tensor(log_ratio),
        advantages=torch.tensor(advantages),
        behavior_weight=torch.tensor(weights),
        clip_low=0.2,
        clip_high=0.28,
        clip_dual=dual,
    )
    expected = [
        surrogate_oracle(*row, 0.2, 0.28, dual)
        for row in zip(log_ratio, advantages, weights, strict=True)
    ]
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
    ratio = np.exp(log_ratio)
    assert low.tolist() == ((ratio < 0.8) & (advantages < 0)).tolist()
    assert high.tolist() == ((ratio > 1.28) & (advantages > 0)).tolist()


@pytest.mark.parametrize(("ratio", "factor"), [(1.0, 1.0), (0.5, 0.8), (3.0, 2.0)])
def test_cispo_bounds_the_ratio_and_keeps_the_gradient_of_every_token(
    ratio: float, factor: float
) -> None:
    policy = torch.tensor([-1.0], requires_grad=True)
    loss, low, high = cispo_loss(
        policy,
        log_ratio=torch.tensor([math.log(ratio)]),
        advantages=torch.tensor([-3.0]),
        behavior_weight=torch.tensor([0.5]),
        clip_low=0.2,
        clip_high=1.0,
    )
    loss.sum().backward()
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(0.5 * factor * 3.0)
    assert loss.item() == pytest.approx(-0.5 * factor * 3.0)
    assert (low.item(), high.item()) == (ratio < 0.8, ratio > 2.0)


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"),
    [
        ("token_mean", None, [0.2, 0.2, 0, 0.2, 0.2, 0.2, 0]),
        ("sequence_mean", None, [0.25, 0.25, 0, 1 / 6, 1 / 6, 1 / 6, 0]),
        ("sequence_sum", 10, [0.05, 0.05, 0, 0.05, 0.05, 0.05, 0]),
    ],
)
def test_token_weights_by_hand(
    aggregation: Aggregation, constant: int | None, expected: list[float]
) -> None:
    mask = torch.tensor([True, True, False, True, True, True, False])
    index = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    for is_there, weights in ((mask, expected), (torch.zeros_like(mask), [0.0] * 7)):
        parts = Parts(index=index, count=3, mask=is_there)
        found = token_weights(parts, aggregation=aggregation, constant_tokens=constant)
        torch.testing.assert_close(found, torch.tensor(weights))
