"""Tests whether a selection is independent of a number, and their limit, which is fixed beforehand.

Pure: the permutations have a fixed seed, so a certificate that is made again says the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from async_rl.core.types import DoubleArray

LIMIT = 0.01 / 8
"""A smaller p value is a difference: with at most eight tests, a run without any bias is called
biased with a probability of 0.01 (Bonferroni).
"""
NUM_PERMUTATIONS = 9_999
_MOST = 2_000  # values of each side: their permutations take half a second of one core


def rank_test(chosen: DoubleArray, others: DoubleArray, *, is_one_sided: bool = False) -> float:
    """Return the p value of the hypothesis that `chosen` is a random subset of all values.

    chosen [n], others [m], float64. The statistic is the sum of the ranks of `chosen` (Wilcoxon),
    compared with random subsets of the same size; one-sided: larger values only. Of more than
    2,000 values a random subset is used.
    """
    rng = np.random.default_rng(0)
    first, second = (rng.permutation(values)[:_MOST] for values in (chosen, others))
    every = np.concatenate([first, second])
    # Equal values share their mean rank.
    _, index, counts = np.unique(every, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[index] - (len(every) + 1) / 2
    sums = np.array(
        [rng.permutation(ranks)[: len(first)].sum() for _ in range(NUM_PERMUTATIONS)]
        + [ranks[: len(first)].sum()]
    )
    if not is_one_sided:
        sums = np.abs(sums)
    # The sums of equal ranks differ in the last digits.
    return float((sums >= sums[-1] - 1e-6).mean())


def excess_p_value(excesses: Sequence[float]) -> float:
    """Return the p value of independent excesses having a mean of 0 rather than above it.

    The sum is divided by the root of the sum of squares, so no variance has to be known, and a few
    large excesses among many small ones count little (a self-normalized sum).
    """
    norm = math.sqrt(sum(value**2 for value in excesses))
    return 0.5 * math.erfc(sum(excesses) / norm / math.sqrt(2)) if norm else 1.0
