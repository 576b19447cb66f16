"""What the oracle of tests/learner/test_steps_equal_the_oracle.py does not see of the losses."""

import math

import pytest
import torch

from async_rl.algorithms.losses import (
    Aggregation,
    behavior_weights,
    effective_sequences,
    token_weights,
    vespo_loss,
)
from async_rl.algorithms.parts import Parts


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


FOUR = Parts(index=torch.arange(4), count=4, mask=torch.ones(4, dtype=torch.bool))


def test_the_kernel_of_vespo_is_finite_for_any_ratio() -> None:
    logprobs, log_ratio = torch.zeros(4, requires_grad=True), torch.tensor([-500.0, -30, 30, 500])
    loss = vespo_loss(logprobs, log_ratio=log_ratio, advantages=torch.ones(4), sequences=FOUR).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.abs().max() < 1e-12


def test_the_effective_share_survives_weights_that_no_float_holds() -> None:
    old = torch.tensor([900.0, -900.0, 0.0, 5.0])
    assert effective_sequences(old, sequences=FOUR) == pytest.approx(0.25)
    empty = Parts(index=FOUR.index, count=4, mask=~FOUR.mask)
    assert effective_sequences(old, sequences=empty) == 1.0


def test_the_weight_of_a_sequence_is_bounded_where_its_square_would_overflow_only() -> None:
    one = Parts(index=torch.zeros(2, dtype=torch.int64), count=1, mask=torch.ones(2) > 0)
    for total, logarithm in ((25.0, 25.0), (500.0, 30.0), (-25.0, -25.0), (-500.0, -30.0)):
        log_ratio = torch.tensor([total, 0.0], dtype=torch.float64)
        found = behavior_weights(
            log_ratio, sequences=one, correction="sequence_tis", maximum=2.0, minimum=0.0
        )
        assert found.raw.tolist() == pytest.approx([math.exp(logarithm)] * 2)
        assert found.raw.float().square().isfinite().all()
        assert found.is_bounded.tolist() == [total > 0] * 2
        assert found.weights.tolist() == pytest.approx([min(2.0, math.exp(logarithm))] * 2)


def test_many_small_terms_after_a_large_one_are_counted() -> None:
    """A float32 slot that has reached 1e8 loses every 1 that is added to it."""
    x = torch.tensor([1e8, *[1.0] * 4000, -1e8])
    parts = Parts(index=torch.zeros(len(x), dtype=torch.int64), count=1, mask=x != 0)
    assert parts.sums(x).tolist() == [4000.0]
    assert parts.mean(x)[0] == pytest.approx(4000 / 4002)
