"""Tests whether a selection is independent of a number, and their limit, which is fixed beforehand.

Pure: the permutations have a fixed seed, so a certificate that is made again says the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from async_rl.core.types import DoubleArray

FAMILY_ALPHA = 0.01
"""Probability that a run without any bias is called biased, over all tests of a certificate."""
NUM_TESTS = 8
LIMIT = FAMILY_ALPHA / NUM_TESTS
"""A smaller p value is a difference (Bonferroni)."""
NUM_PERMUTATIONS = 9_999
_MOST = 2_000  # values of each side: their permutations take half a second of one core


def rank_test(chosen: DoubleArray, others: DoubleArray, *, is_one_sided: bool = False) -> float:
    """Return the p value of the hypothesis that `chosen` is a random subset of all values.

    chosen [n], others [m], float64. The statistic is the sum of the ranks of `chosen` (Wilcoxon),
    compared with random subsets of the same size; one-sided: larger values only. Of more than
    2,000 values a random subset is used.
    """
    rng = np.random.default_rng(0)
    sides = [rng.permutation(values)[:_MOST] for values in (chosen, others)]
    ranks = _ranks(np.concatenate(sides))
    ranks -= ranks.mean()
    size = len(sides[0])
    observed = ranks[:size].sum()
    sums = np.array([rng.permutation(ranks)[:size].sum() for _ in range(NUM_PERMUTATIONS)])
    if not is_one_sided:
        observed, sums = abs(observed), np.abs(sums)
    # The sums of equal ranks differ in the last digits.
    num_extreme = int((sums >= observed - 1e-6).sum())
    return (1 + num_extreme) / (1 + NUM_PERMUTATIONS)


def _ranks(values: DoubleArray) -> DoubleArray:
    """Return the ranks from 1; equal values share their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks: DoubleArray = (last - (counts - 1) / 2)[index]
    return ranks


def excess_p_value(excesses: Sequence[float]) -> float:
    """Return the p value of independent excesses having a mean of 0 rather than above it.

    The sum is divided by the root of the sum of squares, so no variance has to be known, and a few
    large excesses among many small ones count little (a self-normalized sum).
    """
    values = np.array(excesses, dtype=np.float64)
    norm = float(np.linalg.norm(values))
    return 0.5 * math.erfc(float(values.sum()) / norm / math.sqrt(2)) if norm else 1.0
