"""The losses in async_rl/examples/losses/ against slow float64 oracles in loops, on parts with
masked tokens.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from off_policy_cases import TOKENS, Case, over_two_ranks

from async_rl.algorithms.parts import Parts
from async_rl.examples.losses import m2po
from async_rl.examples.losses.gac import repeated_part
from async_rl.examples.losses.geometric import geometric_outliers
from async_rl.examples.losses.m2po import second_moment_bound


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([1e-6, 0.04, 0.3, 100.0]))
def test_m2po_drops_the_largest_until_the_mean_square_is_below_the_limit(
    seed: int, limit: float
) -> None:
    case = Case(seed)
    bound = second_moment_bound(case.log_ratio, sequences=case.sequences, limit=limit)
    trained = [i for i in range(TOKENS) if case.mask[i]]
    kept = sorted(trained, key=lambda i: case.log_ratio[i].item() ** 2)
    while kept and np.mean([case.log_ratio[i].item() ** 2 for i in kept]) >= limit:
        kept.pop()
    assert sorted(kept) == [i for i in trained if abs(case.log_ratio[i].item()) <= bound]


@pytest.mark.parametrize("bound", [0.05, 0.5, 0.9])
def test_a_gradient_keeps_its_own_part_and_the_bound_as_its_cosine(bound: float) -> None:
    rng = np.random.default_rng(0)
    before = rng.normal(size=50)
    for share in (-1.0, 0.0, 0.1, 2.0, 30.0):
        gradient = share * before + rng.normal(size=50)
        cosine = gradient @ before / np.linalg.norm(gradient) / np.linalg.norm(before)
        part = repeated_part(gradient @ gradient, gradient @ before, before @ before, bound=bound)
        cut = gradient - part * before
        now = cut @ before / np.linalg.norm(cut) / np.linalg.norm(before)
        assert now == pytest.approx(min(cosine, bound))
        # What is orthogonal to the direction before is untouched.
        own = np.linalg.norm(gradient) * (1 - cosine**2) ** 0.5
        assert np.linalg.norm(cut) * (1 - now**2) ** 0.5 == pytest.approx(own)


def test_without_a_direction_before_a_gradient_is_whole_and_its_copy_is_cut_away() -> None:
    assert repeated_part(4.0, 0.0, 0.0, bound=0.1) == 0.0
    assert repeated_part(0.0, 0.0, 4.0, bound=0.1) == 0.0
    assert repeated_part(4.0, 8.0, 16.0, bound=0.1) == 0.5
    assert repeated_part(4.0, 8.000001, 16.0, bound=1.0) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_mask_the_tokens_that_one_rank_masks(seed: int) -> None:
    case = Case(seed)
    log_ratio = case.log_ratio * 0.4
    case.log_ratio = log_ratio
    weights, raw, is_bounded = m2po.weights(log_ratio, sequences=case.sequences)
    assert 0 < int((is_bounded & case.sequences.mask).sum()) < TOKENS
    torch.testing.assert_close(weights, torch.where(is_bounded, 0.0, log_ratio.exp()))
    torch.testing.assert_close(raw, log_ratio.exp())
    halves = over_two_ranks(case, lambda own, parts: m2po.weights(own, sequences=parts).weights)
    torch.testing.assert_close(torch.cat(halves), weights)
    bound = second_moment_bound(log_ratio, sequences=case.sequences, limit=0.03)
    bounds = over_two_ranks(
        case, lambda own, parts: second_moment_bound(own, sequences=parts, limit=0.03)
    )
    assert bounds == pytest.approx([bound, bound])


def test_the_geometric_mask_looks_at_the_mean_and_not_at_the_length() -> None:
    # sequence 0: ratios 2 and 1/2, mean 1; sequence 1: 1.2 throughout, mean 1.2 although the
    # product is 1.2^4 = 2.1
    log_ratio = torch.tensor([2.0, 0.5, 1.2, 1.2, 1.2, 1.2]).log()
    index, mask = torch.tensor([0, 0, 1, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    sequences = Parts(index=index, count=2, mask=mask)
    assert not geometric_outliers(log_ratio, sequences=sequences, maximum=1.3, minimum=0.8).any()
    assert (
        geometric_outliers(log_ratio, sequences=sequences, maximum=1.1, minimum=0.0).tolist()
        == [False] * 2 + [True] * 4
    )
    assert (
        geometric_outliers(-log_ratio, sequences=sequences, maximum=math.inf, minimum=0.9).tolist()
        == [False] * 2 + [True] * 4
    )
