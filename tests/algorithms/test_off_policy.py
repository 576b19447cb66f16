"""The published off-policy methods against slow float64 oracles in loops, on parts with masked
tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from off_policy_cases import TOKENS, Case, over_two_ranks

from async_rl.algorithms.losses import effective_sequences, vespo_loss
from async_rl.algorithms.parts import Parts


def test_the_kernel_of_vespo_is_finite_for_any_ratio() -> None:
    logprobs = torch.zeros(4, requires_grad=True)
    loss = vespo_loss(
        logprobs,
        log_ratio=torch.tensor([-500.0, -30.0, 30.0, 500.0]),
        advantages=torch.ones(4),
        sequences=Parts(index=torch.arange(4), count=4, mask=torch.ones(4, dtype=torch.bool)),
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert gradient.abs().max() < 1e-12


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_effective_share_counts_sequences_with_a_trained_token(seed: int) -> None:
    case = Case(seed)
    weights = []
    for sequence in range(4):
        own = [i for i in range(TOKENS) if case.index[i] == sequence and case.mask[i]]
        if own:
            weights.append(math.exp(sum(case.log_ratio[i].item() for i in own)))
    expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert effective_sequences(case.log_ratio, sequences=case.sequences) == pytest.approx(expected)


def test_the_effective_share_survives_weights_that_no_float_holds() -> None:
    sequences = Parts(index=torch.arange(4), count=4, mask=torch.ones(4, dtype=torch.bool))
    old = torch.tensor([900.0, -900.0, 0.0, 5.0])
    assert effective_sequences(old, sequences=sequences) == pytest.approx(0.25)
    empty = Parts(index=torch.arange(4), count=4, mask=torch.zeros(4, dtype=torch.bool))
    assert effective_sequences(old, sequences=empty) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_find_the_share_that_one_rank_finds(seed: int) -> None:
    case = Case(seed)
    share = effective_sequences(case.log_ratio, sequences=case.sequences)
    assert over_two_ranks(
        case, lambda log_ratio, parts: effective_sequences(log_ratio, sequences=parts)
    ) == pytest.approx([share, share])
