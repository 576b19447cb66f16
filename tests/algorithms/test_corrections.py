from __future__ import annotations

import math

import pytest
import torch

from async_rl.algorithms.losses import BehaviorCorrection, behavior_weights
from async_rl.algorithms.parts import Parts


def of_one(log_ratio: torch.Tensor) -> Parts:
    return Parts(
        index=torch.zeros(len(log_ratio), dtype=torch.int64),
        count=1,
        mask=torch.ones(len(log_ratio), dtype=torch.bool),
    )


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
