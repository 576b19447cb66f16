"""Statements about weights: which version reached which generator, by the generator's own answers.

Evidence: versions.jsonl (what was published), pushes.jsonl (each answer, with the version that the
generator reports and its probe), and the generators of the ledger. A probe compares changes, so a
generator that keeps old weights is detected although both versions are within the tolerance.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from async_rl.buffer.store.connection import Connection
from async_rl.core import jsonl
from async_rl.runs.certificate.statements import Statement, listed, ranges, statement
from async_rl.training.checkpoints import (
    PUSHES_FILE,
    VERSIONS_FILE,
    Probed,
    Published,
    Pushed,
)

_SURE = 3.0
"""Standard errors between the share that a generator followed and 1/2. An engine has the new
weights (1) or the old ones (0).
"""
Version = tuple[int, int]
"""The learner's life, and a version that it published."""
Life = tuple[str, int]
"""The name of a generator, and its pid."""


def weights(run_dir: Path, store: Connection, probe_every_pushes: int) -> Iterator[Statement]:
    """Yield the statements about pushes."""
    published = {
        (each.life, each.version): number
        for number, each in enumerate(jsonl.read(run_dir / VERSIONS_FILE, Published))
    }
    answers = [
        push
        for push in jsonl.read(run_dir / PUSHES_FILE, Pushed)
        if (push.life, push.version) in published
    ]
    lives: dict[Life, list[Pushed]] = {}
    for push in answers:
        lives.setdefault((push.generator, push.pid), []).append(push)
    yield _reached(published, lives, store)
    yield _computed(lives, probe_every_pushes)


def _reached(
    published: Mapping[Version, int], lives: Mapping[Life, list[Pushed]], store: Connection
) -> Statement:
    broken = [
        f"{_named(life)} was sent version {push.version} and reported version {push.loaded}"
        for life, pushes in lives.items()
        for push in pushes
        if push.loaded not in (None, push.version)
    ]
    query = (
        "SELECT DISTINCT generator FROM transitions WHERE state='generating' AND generator LIKE"
        " 'generator-%'"
    )
    used = {name for (name,) in store.execute(query)}
    silent = sorted(used - {name for name, _ in lives})
    broken += [f"{name} received prompts, and no push to it is on record" for name in silent]
    absences = [each for life, pushes in lives.items() for each in _absent(published, life, pushes)]
    num_loads = sum(push.loaded is not None for pushes in lives.values() for push in pushes)
    unknown = [] if lives else ["the run has no pushes.jsonl"]
    evidence = [
        f"{len(published)} versions of {len({life for life, _ in published})} lives of the learner,"
        f" {len(lives)} lives of generators: {num_loads} loads, each reported by the generator;"
        f" {len(absences)} absences"
    ]
    return statement(
        "weights",
        "every push reached every generator, or its absence is listed",
        broken=broken if lives else (),
        unknown=unknown,
        evidence=[*evidence, *listed(absences)] if lives else (),
    )


def _absent(published: Mapping[Version, int], life: Life, pushes: list[Pushed]) -> Iterator[str]:
    """Yield a sentence for each group of versions that a life did not load while it served."""
    loaded = {(push.life, push.version) for push in pushes if push.loaded is not None}
    for push in pushes:
        if push.loaded is None:
            # Some errors of engines have a traceback, so the first line.
            yield f"version {push.version} at {_named(life)}: cut off ({_first_line(push.reason)})"
    asked = loaded | {(push.life, push.version) for push in pushes}
    first, last = (end(published[each] for each in asked) for end in (min, max))
    missed = [each for each, number in published.items() if first < number < last]
    ends = {learner: version for learner, version in published}  # the newest of each life
    reasons: dict[str, list[int]] = {}
    for learner, version in missed:
        if (learner, version) not in asked:
            reason = "never asked: a newer version was published before its turn"
            if ends[learner] == version:
                reason = f"no answer: life {learner} of the learner ended first"
            reasons.setdefault(reason, []).append(version)
    for reason, versions in reasons.items():
        yield f"version {ranges(versions)} at {_named(life)}: {reason}"


def _computed(lives: Mapping[Life, list[Pushed]], probe_every_pushes: int) -> Statement:
    broken: list[str] = []
    undecided: list[str] = []
    followed: list[float] = []
    num_first = num_unprobed = 0
    differences: list[float] = []
    for life, pushes in lives.items():
        loads = [push for push in pushes if push.loaded is not None]
        probes = [push.probed for push in loads if push.probed is not None]
        num_unprobed += len(loads) - len(probes)
        differences += [probe.mean for probe in probes if probe.mean is not None]
        broken += [f"{_named(life)}: {probe.problem}" for probe in probes if probe.problem]
        compared = [probe for probe in probes if probe.followed is not None]
        num_first += len(probes) - len(compared)
        followed += [probe.followed or 0.0 for probe in compared]
        broken += _kept(life, compared)
        undecided += _undecided(life, compared)
    evidence = []
    if differences:
        evidence = [
            f"{len(differences)} probes: the mean difference of the log-probs to the learner's is"
            f" {statistics.median(differences):.2g} nats in the median, {max(differences):.2g} at"
            " most",
            f"{len(followed)} of them show a change of the learner, of which the generators"
            f" followed {min(followed, default=math.nan):.3f} to"
            f" {max(followed, default=math.nan):.3f} (1 = the new weights, 0 = the old ones);"
            f" {num_first} have no earlier probe of the same life, or no change",
        ]
    if num_unprobed:
        evidence.append(
            f"{num_unprobed} loads were not probed (weights.probe_every_pushes="
            f"{probe_every_pushes}); for these only the reported version is known"
        )
    unknown = undecided if differences else ["no load was probed"]
    return statement(
        "weights",
        "each generator computes with the weights that it was sent",
        broken=broken,
        unknown=unknown,
        evidence=evidence,
    )


def _kept(life: Life, probes: Sequence[Probed]) -> Iterator[str]:
    """Yield a sentence about the versions after whose load a life computed with the old weights."""
    stale = [probe for probe in probes if _share(probe) + _SURE * _error(probe) < 0.5]
    if stale:
        shares = [_share(probe) for probe in stale]
        yield (
            f"{_named(life)} reported version {ranges(probe.version for probe in stale)} and kept"
            f" its old weights: its log-probs followed {min(shares):.3f} to {max(shares):.3f} of"
            " the learner's change"
        )


def _undecided(life: Life, probes: Sequence[Probed]) -> Iterator[str]:
    """Yield a sentence if the rounding of a life's log-probs is as large as the changes."""
    unsure = [probe for probe in probes if abs(_share(probe) - 0.5) <= _SURE * _error(probe)]
    if not unsure:
        return
    # Together they may decide what one of them does not: weighted by their precision.
    precisions = [_error(probe) ** -2 for probe in probes if _error(probe) > 0]
    shares = [_share(probe) for probe in probes if _error(probe) > 0]
    pooled = sum(itertools.starmap(float.__mul__, zip(precisions, shares, strict=True)))
    pooled /= sum(precisions)
    error = sum(precisions) ** -0.5
    if pooled - _SURE * error <= 0.5:
        yield (
            f"{_named(life)}: {len(unsure)} of {len(probes)} probes do not decide, because the"
            f" weights changed less than the rounding of the log-probs; together they followed"
            f" {pooled:.2f} ± {error:.2f}"
        )


def _share(probe: Probed) -> float:
    return 0.0 if probe.followed is None else probe.followed


def _error(probe: Probed) -> float:
    return 0.0 if probe.error is None else probe.error


def _named(life: Life) -> str:
    return f"{life[0]} (pid {life[1]})"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
