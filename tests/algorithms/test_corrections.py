from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.losses import BehaviorCorrection, behavior_weights
from async_rl.algorithms.parts import Parts

CORRECTIONS: tuple[BehaviorCorrection, ...] = (
    "none",
    "token_tis",
    "token_mis",
    "sequence_tis",
    "sequence_mis",
)


def of_one(log_ratio: torch.Tensor) -> Parts:
    return Parts(
        index=torch.zeros(len(log_ratio), dtype=torch.int64),
        count=1,
        mask=torch.ones(len(log_ratio), dtype=torch.bool),
    )


def weight_oracle(
    log_ratios: list[float],
    index: list[int],
    mask: list[bool],
    correction: str,
    maximum: float,
    minimum: float,
) -> list[float]:
    """Token by token, from the definitions."""
    result = []
    for i, log_ratio in enumerate(log_ratios):
        weight = math.exp(log_ratio)
        if correction.startswith("sequence"):
            weight = 1.0
            for other, s, m in zip(log_ratios, index, mask, strict=True):
                weight *= math.exp(other) if m and s == index[i] else 1.0
        if correction == "none":
            result.append(1.0)
        elif correction.endswith("tis"):
            result.append(min(weight, maximum))
        else:
            result.append(weight if minimum <= weight <= maximum else 0.0)
    return result


@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_weights_equal_the_definition(correction: BehaviorCorrection, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 12))
    log_ratio, index, mask = rng.normal(size=n), rng.integers(0, 3, n), rng.random(n) < 0.7
    sequences = Parts(index=torch.tensor(index), count=3, mask=torch.tensor(mask))
    found = behavior_weights(
        torch.tensor(log_ratio),
        sequences=sequences,
        correction=correction,
        maximum=2.0,
        minimum=0.5,
    )
    expected = weight_oracle(
        log_ratio.tolist(), index.tolist(), mask.tolist(), correction, 2.0, 0.5
    )
    np.testing.assert_allclose(found.weights, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("correction", "expected", "bounded"),
    [
        ("none", [1.0, 1.0, 1.0], [False, False, False]),
        ("token_tis", [0.1, 1.0, 2.0], [False, False, True]),
        ("token_mis", [0.0, 1.0, 0.0], [True, False, True]),
        ("sequence_tis", [0.4, 0.4, 0.4], [False, False, False]),  # 0.1 * 1 * 4
        ("sequence_mis", [0.0, 0.0, 0.0], [True, True, True]),
    ],
)
def test_weights_by_hand(
    correction: BehaviorCorrection, expected: list[float], bounded: list[bool]
) -> None:
    log_ratio = torch.tensor([0.1, 1.0, 4.0]).log().requires_grad_()
    found = behavior_weights(
        log_ratio, sequences=of_one(log_ratio), correction=correction, maximum=2.0, minimum=0.5
    )
    torch.testing.assert_close(found.weights, torch.tensor(expected))
    assert found.is_bounded.tolist() == bounded
    assert not found.weights.requires_grad


def test_the_weight_of_a_sequence_is_bounded_where_its_square_would_overflow_only() -> None:
    for total, logarithm in ((25.0, 25.0), (500.0, 30.0), (-25.0, -25.0), (-500.0, -30.0)):
        log_ratio = torch.tensor([total, 0.0], dtype=torch.float64)
        raw = behavior_weights(
            log_ratio,
            sequences=of_one(log_ratio),
            correction="sequence_tis",
            maximum=2.0,
            minimum=0.0,
        ).raw
        assert raw.tolist() == pytest.approx([math.exp(logarithm)] * 2)
        assert raw.float().square().isfinite().all()
