"""Statements about what was left out: whether what was trained is like what was generated.

A group is left out when it is complete (too old, untrainable), and an attempt when it fails before.
Of a complete group the ledger has lengths and rewards, of a failed attempt only its seconds, which
are a lower bound: a test for longer attempts is then one-sided. The test and its limit are in
two_samples.py. Attempts that end with their generator are not tested, because its end is no choice
among groups; no_signal is a choice of the configuration, and only counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.core.types import DoubleArray, DropReason
from async_rl.runs.certificate.statements import Statement, statement
from async_rl.runs.certificate.two_samples import LIMIT, rank_test

_NUMBERS = {
    "response length, tokens": "response_length_mean",
    "reward": "reward_mean",
    "generation time, s": "generation_s",
    "age, versions": "max(train_version - oldest_version, 0)",
}
# Only complete groups have these numbers.
_VALUES = (
    "SELECT state, {} AS value FROM groups WHERE purpose='train' AND state IN ('trained',"
    f" 'dropped') AND reason != '{DropReason.NO_SIGNAL}' AND value IS NOT NULL"
)
# How each hand-out ended, and after how many seconds.
_ATTEMPTS = (
    "SELECT why, next_s - at_s FROM (SELECT t.state AS state, at_s, lead(at_s) OVER each AS next_s,"
    " lead(t.reason) OVER each AS why FROM transitions t JOIN groups USING (group_id) WHERE"
    " purpose='train' WINDOW each AS (PARTITION BY group_id ORDER BY transition_id)) WHERE"
    " state='generating' AND next_s IS NOT NULL"
)
_NO_CHOICE = (DropReason.GENERATOR_LOST, DropReason.SCORING_OUTAGE, DropReason.NOT_TAKEN)
"""Reasons that say nothing about the group whose attempt ended."""
_LEAST_EFFECT = 0.01
"""Difference of the means, as a share, below which a difference is reported and breaks nothing."""


def selection(store: Connection) -> Iterator[Statement]:
    """Yield the statements about lengths, times, rewards and ages."""
    for name, column in _NUMBERS.items():
        sides: dict[str, list[float]] = {"trained": [], "dropped": []}
        for state, value in store.execute(_VALUES.format(column)):
            sides[state].append(value)
        kept, left = (np.array(values, np.float64) for values in sides.values())
        evidence = [f"trained: {_distribution(kept)}; left out: {_distribution(left)}"]
        yield _compared(f"trained groups are like generated ones: {name}", kept, left, evidence)
    yield _attempts(store)


def _compared(
    promise: str,
    kept: DoubleArray,
    left: DoubleArray,
    evidence: list[str],
    *,
    is_one_sided: bool = False,
) -> Statement:
    broken: list[str] = []
    if len(kept) and len(left):
        every = np.concatenate([kept, left])
        p = rank_test(left, kept, is_one_sided=is_one_sided)
        effect = (kept.mean() - every.mean()) / (abs(every.mean()) or 1.0)
        sentence = (
            f"without the {len(left)} that were left out the mean differs by {effect:+.1%} from"
            f" that of all; p = {p:.2g} (limit {LIMIT:.2g}{', one-sided' * is_one_sided})"
        )
        is_biased = p < LIMIT and abs(effect) >= _LEAST_EFFECT
        (broken if is_biased else evidence).append(sentence)
    return statement("selection", promise, broken=broken, evidence=evidence)


def _attempts(store: Connection) -> Statement:
    by_reason: dict[str, list[float]] = defaultdict(list)
    for reason, seconds in store.execute(_ATTEMPTS):
        by_reason[reason].append(seconds)
    evidence = [
        f"{f'failed ({reason})' if reason else 'complete'}, s: {_distribution(np.array(seconds))}"
        for reason, seconds in by_reason.items()
    ]
    failed = [s for why in by_reason if why and why not in _NO_CHOICE for s in by_reason[why]]
    return _compared(
        "attempts did not fail because they were long",
        np.array(by_reason[""]),
        np.array(failed),
        evidence,
        is_one_sided=True,
    )


def _distribution(values: DoubleArray) -> str:
    if not len(values):
        return "none"
    middle, high, most = np.quantile(values, (0.5, 0.9, 1.0))
    return (
        f"n {len(values)}, mean {values.mean():.4g}, median {middle:.4g}, 90 % {high:.4g}, most"
        f" {most:.4g}"
    )
