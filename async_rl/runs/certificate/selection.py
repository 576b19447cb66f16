"""Statements about what was left out: whether what was trained is like what was generated.

A group is left out when it is complete (too old, untrainable), and an attempt when it fails before.
Of a complete group the ledger has lengths and rewards, of a failed attempt only its seconds, which
are a lower bound: a test for longer attempts is then one-sided. The test and its limit are in
two_samples.py. Attempts that end with their generator are not tested, because its end is no choice
among groups; no_signal is a choice of the configuration, and only reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.config.run import RunConfig
from async_rl.core.types import DoubleArray, DropReason
from async_rl.runs.certificate.statements import Statement, statement
from async_rl.runs.certificate.two_samples import LIMIT, rank_test

_COMPLETE = (
    "SELECT state, reason, response_length_mean, reward_mean, generation_s, train_version -"
    " oldest_version, num_trained_tokens FROM groups WHERE purpose='train' AND num_tokens IS NOT"
    " NULL AND state IN ('trained', 'dropped')"
)
# How each hand-out ended, and after how many seconds.
_ATTEMPTS = (
    "SELECT next, why, next_s - at_s FROM (SELECT t.state AS state, at_s, lead(t.state) OVER each"
    " AS next, lead(at_s) OVER each AS next_s, lead(t.reason) OVER each AS why FROM transitions t"
    " JOIN groups USING (group_id) WHERE purpose='train' WINDOW each AS (PARTITION BY group_id"
    " ORDER BY transition_id)) WHERE state='generating' AND next IS NOT NULL"
)
_NO_CHOICE = (DropReason.GENERATOR_LOST, DropReason.SCORING_OUTAGE, DropReason.NOT_TAKEN)
"""Reasons that say nothing about the group whose attempt ended."""
_LEAST_EFFECT = 0.01
"""Difference of the means, as a share, below which a difference is reported and breaks nothing."""


class _Complete(NamedTuple):
    state: str
    reason: str
    length: float
    reward: float
    seconds: float
    age: int | None
    num_trained_tokens: int


def selection(config: RunConfig, store: Connection) -> Iterator[Statement]:
    """Yield the statements about lengths, times and rewards."""
    groups = [_Complete._make(row) for row in store.execute(_COMPLETE)]
    trained = [group for group in groups if group.state == "trained"]
    dropped = [
        group
        for group in groups
        if group.state == "dropped" and group.reason != DropReason.NO_SIGNAL
    ]
    by_choice = [group for group in groups if group.reason == DropReason.NO_SIGNAL]
    (compacted,) = store.execute("SELECT coalesce(sum(number), 0) FROM compacted_groups").fetchone()
    notes = [f"{compacted} compacted groups have no lengths any more"] if compacted else []
    if by_choice:
        notes.append(
            f"{len(by_choice)} groups with equal rewards were replaced (buffer.uniform_groups="
            f"{config.buffer.uniform_groups})"
        )
    for name, unit in (("length", "tokens"), ("reward", "reward"), ("seconds", "s")):
        yield _compared(
            f"trained groups have the {_TITLES[name]} of generated ones",
            *(
                np.array([getattr(group, name) for group in part], np.float64)
                for part in (trained, dropped)
            ),
            unit=unit,
            notes=notes,
        )
    yield _ages(config, trained, dropped)
    yield _attempts(store)


_TITLES = {"length": "response length", "reward": "reward", "seconds": "generation time"}


def _compared(
    promise: str, kept: DoubleArray, left: DoubleArray, *, unit: str, notes: list[str]
) -> Statement:
    if not len(left) or not len(kept):
        evidence = [f"no complete group was left out; trained: {_distribution(kept, unit)}"]
        return statement("selection", promise, evidence=[*evidence, *notes])
    both = np.concatenate([kept, left])
    p = rank_test(left, kept)
    mean = float(both.mean())
    effect = (float(kept.mean()) - mean) / abs(mean) if mean else 0.0
    evidence = [
        f"generated: {_distribution(both, unit)}",
        f"trained: {_distribution(kept, unit)}",
        f"left out: {_distribution(left, unit)}",
        f"the mean of what is trained differs by {effect:+.1%} from what was generated; p = {p:.2g}"
        f" (limit {LIMIT:.2g})",
    ]
    broken = []
    if p < LIMIT and abs(effect) >= _LEAST_EFFECT:
        broken = [f"the groups that were left out differ: {evidence.pop()}"]
    return statement("selection", promise, broken=broken, evidence=[*evidence, *notes])


def _attempts(store: Connection) -> Statement:
    complete: list[float] = []
    failed: dict[str, list[float]] = {}
    for state, reason, seconds in store.execute(_ATTEMPTS):
        if state == "ready" or not reason:
            complete.append(seconds)
        else:
            failed.setdefault(reason, []).append(seconds)
    total = len(complete) + sum(map(len, failed.values()))
    evidence = [
        f"{len(seconds)} of {total} attempts failed ({reason}):"
        f" {_distribution(np.array(seconds), 's')}"
        for reason, seconds in sorted(failed.items())
    ]
    if failed:
        evidence.append(
            f"complete: {_distribution(np.array(complete), 's')}; how many tokens a failed attempt"
            " had is not recorded"
        )
    chosen = np.array([s for reason in failed if reason not in _NO_CHOICE for s in failed[reason]])
    broken = []
    if len(chosen) and complete:
        p = rank_test(chosen, np.array(complete), is_one_sided=True)
        longer = float(chosen.mean()) / (float(np.mean(complete)) or 1.0) - 1
        sentence = (
            f"{len(chosen) / total:.1%} of the attempts failed for a reason of their own, after"
            f" {longer:+.1%} of the time that complete ones took; p = {p:.2g} (one-sided, limit"
            f" {LIMIT:.2g})"
        )
        is_longer = p < LIMIT and longer >= _LEAST_EFFECT
        if is_longer:
            broken = [f"long attempts were discarded: {sentence}"]
        else:
            evidence.append(sentence)
    return statement(
        "selection",
        "attempts did not fail because they were long",
        broken=broken,
        evidence=evidence or [f"all {total} attempts were complete"],
    )


def _ages(config: RunConfig, trained: list[_Complete], dropped: list[_Complete]) -> Statement:
    bound = config.buffer.max_staleness_versions
    ages = np.array([max(group.age, 0) for group in trained if group.age is not None], np.float64)
    too_old = sum(group.reason == DropReason.OVER_AGE for group in dropped)
    over = int((ages > bound).sum()) if config.buffer.age_rule != "mask" else 0
    return statement(
        "selection",
        f"no trained group is older than {bound} versions",
        broken=[f"{over} trained groups are older"] if over else (),
        evidence=[
            f"age of trained groups: {_distribution(ages, 'versions')}",
            f"{too_old} groups were dropped because they were too old",
        ],
    )


def _distribution(values: DoubleArray, unit: str) -> str:
    if not len(values):
        return "none"
    middle, high = np.quantile(values, (0.5, 0.9))
    return (
        f"n {len(values)}, mean {values.mean():.4g} {unit}, median {middle:.4g}, 90 %"
        f" {high:.4g}, most {values.max():.4g}"
    )
