"""What the oracle of tests/learner/test_steps_equal_the_oracle.py does not see of the losses."""

from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.losses import Aggregation, effective_sequences, token_weights, vespo_loss
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
