"""Means with their errors, and tests of differences corrected for the number of comparisons.

Values are paired: the i-th value of each list belongs to the same seed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)

_POINTS = 20_001


class Ratio(NamedTuple):
    """A ratio of paired values: its geometric mean, its factor of error, and the p value of 1.

    error: exp of the standard error of the mean log-ratio, so the ratio lies between value / error
    and value * error as often as a mean lies within its standard error.
    """

    value: float
    error: float
    p: float
    num_pairs: int


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, nan for one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, statistics.stdev(values) / len(values) ** 0.5


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Return mean +- standard error as text, one value as it is, and "never" without a value."""
    if not values:
        return "never"
    mean, error = mean_and_error(values)
    return f"{mean:{form}}" if len(values) == 1 else f"{mean:{form}} +- {error:{form}}"


def student_p(t: float, degrees: int) -> float:
    """Return the probability of a value beyond +-t under Student's distribution.

    With t = sqrt(degrees) tan(angle) its density is proportional to cos(angle) ** (degrees - 1).
    """
    limit = math.atan(abs(t) / degrees**0.5)
    angles = np.linspace(limit, math.pi / 2, _POINTS)
    whole = np.linspace(0, math.pi / 2, _POINTS)
    beyond, total = (
        float(np.trapezoid(np.cos(each) ** (degrees - 1), each)) for each in (angles, whole)
    )
    return beyond / total


@functools.cache
def student_t(share: float, degrees: int) -> float:
    """Return the t within whose +-t that share of Student's distribution lies."""
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, degrees) > 1 - share else (low, middle)
    return low


def ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """Compare positive values with the values of the same seeds by a t test of their log-ratios.

    Raises ValueError for fewer than two pairs.
    """
    logs = [math.log(a / b) for a, b in zip(values, base, strict=True)]
    if len(logs) < 2:
        raise ValueError(f"{len(logs)} pairs have no error; run at least two seeds")
    mean, error = mean_and_error(logs)
    # Equal ratios, which are all 1 where both are censored at the same step, show no difference.
    # Without any spread there is no doubt, unless all ratios are 1, as where both are censored.
    t = mean / error if error else math.inf * mean if mean else 0.0
    return Ratio(math.exp(mean), math.exp(error), student_p(t, len(logs) - 1), len(logs))


def holm(p_values: Mapping[K, float]) -> dict[K, float]:
    """Return the p values corrected for their number by Holm's method, in the order of p."""
    corrected: dict[K, float] = {}
    highest = 0.0
    ordered = sorted(p_values, key=lambda name: p_values[name])
    for index, name in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - index) * p_values[name]))
        corrected[name] = highest
    return corrected
