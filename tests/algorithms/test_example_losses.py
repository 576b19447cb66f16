"""The losses in async_rl/examples/losses/ against slow oracles. m2po as a whole is one of the cases
of tests/learner/test_steps_equal_the_oracle.py.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.parts import Parts
from async_rl.examples.losses.gac import repeated_part
from async_rl.examples.losses.geometric import geometric_outliers
from async_rl.examples.losses.m2po import second_moment_bound


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([1e-6, 0.04, 0.3, 100.0]))
def test_m2po_drops_the_largest_until_the_mean_square_is_below_the_limit(
    seed: int, limit: float
) -> None:
    rng = np.random.default_rng(seed)
    index, mask, log_ratio = rng.integers(0, 4, 24), rng.random(24) < 0.8, 0.7 * rng.normal(size=24)
    sequences = Parts(index=torch.tensor(index), count=4, mask=torch.tensor(mask))
    bound = second_moment_bound(torch.tensor(log_ratio), sequences=sequences, limit=limit)
    kept = sorted(np.abs(log_ratio[mask]))
    while kept and np.mean(np.square(kept)) >= limit:
        kept.pop()
    assert kept == sorted(x for x in np.abs(log_ratio[mask]) if x <= bound)


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


def test_the_geometric_mask_looks_at_the_mean_and_not_at_the_length() -> None:
    # Sequence 0: ratios 2 and 1/2, mean 1; sequence 1: 1.2 throughout, although its product is 2.1.
    log_ratio = torch.tensor([2.0, 0.5, 1.2, 1.2, 1.2, 1.2]).log()
    index, mask = torch.tensor([0, 0, 1, 1, 1, 1]), torch.ones(6, dtype=torch.bool)
    sequences = Parts(index=index, count=2, mask=mask)
    second = [False] * 2 + [True] * 4
    assert not geometric_outliers(log_ratio, sequences=sequences, maximum=1.3, minimum=0.8).any()
    above = geometric_outliers(log_ratio, sequences=sequences, maximum=1.1, minimum=0.0)
    below = geometric_outliers(-log_ratio, sequences=sequences, maximum=math.inf, minimum=0.9)
    assert (above.tolist(), below.tolist()) == (second, second)
