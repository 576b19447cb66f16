"""The recorded times of a run, in the form that a simulation draws.

An engine writes one token of each sample in flight per step, and a step with n samples takes
1 + beside x (n - 1) times as long as one with a single sample; `beside` is fitted to the run. The
work of a group is the time that it would have taken alone: its recorded time, each second divided
by that factor. A group is complete with its longest sample; until then it has on average the sum of
its lengths divided by the longest in flight.
"""

import collections
import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from async_rl.buffer.store.times import (
    GroupTimes,
    group_times,
    step_times,
)
from async_rl.config.pools import evaluates_only
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.core.types import DoubleArray, Purpose
from async_rl.runs.forecast.scoring import read_scoring
from async_rl.runs.metrics import newest_rows

_LEAST_STEPS = 8
_LEAST_SPREAD = 0.2  # of the mean lengths of batches, relative to their mean
_LARGEST_ERROR = 0.2  # standard error of the share
# Steps of 1/8, then 1/32, ... of the range: 0.0001 in the end.
_GRID = 9
_ROUNDS = 6
_SEEN = 0.999999  # of the error without a slowdown; a smaller difference is rounding
WARM_SHARE = 0.2  # of the steps: the run fills its buffer, so they are left out of rates


@frozen
class Work:
    """One group. units: seconds of generation if one sample were in flight; scoring_s: from its
    last token to its last score, storing_s: from there until it is stored; load: mean samples in
    flight; lengths: response tokens of each sample; first: share of the units before the first
    token; scores: seconds of scoring each sample without waiting for a place.
    """

    units: float
    scoring_s: float
    load: float = 1.0
    lengths: tuple[int, ...] = ()
    first: float = 0.0
    storing_s: float = 0.0
    scores: tuple[float, ...] = ()


@frozen
class Recorded:
    """The times of a run.

    beside: of a further sample in flight, relative to the time of a step with one. step_s: of the
    learner without waits, by step from 1. by_tokens: share of step_s that grows with the tokens of
    a batch, if their numbers differed enough to see it. push_s: from the commit of a step until
    generators have its weights. steps_per_s: measured after the warm-up steps. num_evaluations: to
    which `evaluation` belongs. places_per_unit: places of a verifier for each unit of the setting.
    learner_waits: measured share of time in which the learner waits for a batch, NaN if unknown.
    """

    train: tuple[Work, ...]
    evaluation: tuple[Work, ...]
    beside: float
    step_s: tuple[float, ...]
    push_s: float
    num_generators: int
    num_warm: int
    steps_per_s: float
    by_tokens: float | None = None
    num_evaluations: int = 1
    places_per_unit: int = 1
    learner_waits: float = math.nan


def read_times(run_dir: Path, config: RunConfig) -> Recorded:
    """Read the times of the newest groups. Raises ConfigError if there are too few steps."""
    groups = [
        group
        for group in group_times(run_dir)
        # Generators that only evaluate do not delay generators that train.
        if len(group.samples) and not evaluates_only(config, group.generator)
    ]
    if not groups:
        raise ConfigError(
            f"{run_dir.name} has no times of samples, of which a forecast is made; record a run"
            " with recording=times"
        )
    begun_s = min(group.handed_out_s for group in groups)
    all_committed, lives_s = step_times(run_dir)
    committed = {step: at_s for step, at_s in all_committed.items() if at_s > begun_s}
    rows = newest_rows(run_dir, min(committed, default=0))
    steps = [step for step in sorted(committed) if "time/step_s" in rows.get(step, {})]
    if len(steps) < _LEAST_STEPS:
        raise ConfigError(
            f"{run_dir.name} has {len(steps)} recorded steps; at least {_LEAST_STEPS} are needed to"
            " explain where its time goes"
        )

    def column(name: str, missing: float) -> DoubleArray:
        return np.array([rows[step].get(name, missing) for step in steps])

    whole_s = column("time/step_s", math.nan)
    own_s = whole_s - column("time/wait_batch_s", 0.0)
    push_s = column("weights/push_s", math.nan)
    works, beside = works_of(groups)
    scores, places_per_unit = read_scoring(groups, config)
    works = [replace(work, scores=own) for work, own in zip(works, scores, strict=True)]

    def of_purpose(purpose: Purpose) -> tuple[Work, ...]:
        pairs = zip(works, groups, strict=True)
        return tuple(work for work, group in pairs if group.purpose == purpose)

    every = config.evaluation.every_steps
    # A recording from the first step on has an evaluation of the start model too.
    num_evaluations = len(steps) // every + (steps[0] == 1) if every else 0
    # At least one step, whose commit is where the first measured span starts.
    num_warm = max(1, round(WARM_SHARE * len(steps)))
    measured_s = [committed[step] for step in steps[num_warm - 1 :]]
    # Steps in which a learner started include the time when the run was stopped.
    spans_s = [
        end_s - begin_s
        for begin_s, end_s in itertools.pairwise(measured_s)
        if not any(begin_s < at_s <= end_s for at_s in lives_s)
    ] or [measured_s[-1] - measured_s[0]]
    return Recorded(
        train=of_purpose(Purpose.TRAIN),
        evaluation=of_purpose(Purpose.EVAL),
        beside=beside,
        step_s=tuple(np.maximum(own_s, 0.0).tolist()),
        # Not every row has a push.
        push_s=float(np.nanmean(push_s)) if np.isfinite(push_s).any() else 0.0,
        num_generators=len({group.generator for group in groups}),
        num_warm=num_warm,
        steps_per_s=len(spans_s) / sum(spans_s),
        by_tokens=_share_by_tokens(own_s, column("length/response_mean", math.nan)),
        num_evaluations=max(num_evaluations, 1),
        places_per_unit=places_per_unit,
        learner_waits=float(1 - own_s.sum() / whole_s.sum()),
    )


def _share_by_tokens(own_s: DoubleArray, lengths: DoubleArray) -> float | None:
    """Fit own_s = a + b x length; return the share of b, or None if the fit is undetermined."""
    # Relative lengths, so that slope and constant are both seconds.
    x = lengths / lengths.mean()
    if not np.isfinite(x).all() or np.ptp(x) < _LEAST_SPREAD:
        return None
    (slope, constant), covariance = np.polyfit(x, own_s, 1, cov=True)
    # A slope that the recording does not determine would extrapolate noise to other batch sizes.
    if covariance[0, 0] ** 0.5 > _LARGEST_ERROR * own_s.mean():
        return None
    return float(np.clip(slope / (slope + constant), 0.0, 1.0))


def works_of(groups: list[GroupTimes]) -> tuple[list[Work], float]:
    """Return the work of each group, and how much a further sample in flight slows a step."""
    durations = np.array([max(group.generation_s, 1e-6) for group in groups])
    lengths = [[max(int(length), 1) for length in group.samples[:, 0]] for group in groups]
    longest = np.array([max(own) for own in lengths], dtype=np.float64)
    loads = np.array([sum(own) / max(own) for own in lengths])
    flights = _Flights(groups, durations)
    beside = _fitted(flights, longest)
    units = flights.alone_s(beside)
    works = []
    for index, group in enumerate(groups):
        duration = float(durations[index])
        after_s = max(group.ready_s - group.handed_out_s - duration, 0.0)
        first_s = group.samples[:, 1]
        known = first_s[np.isfinite(first_s)]
        _, _, written_s, scored_s = group.samples.max(axis=0)
        scoring_s = min(max(float(scored_s - written_s), 0.0), after_s)
        works.append(
            Work(
                units=float(units[index]),
                scoring_s=scoring_s,
                storing_s=after_s - scoring_s,
                load=float(loads[index]),
                lengths=tuple(lengths[index]),
                first=min(float(known.min()) / duration, 1.0) if len(known) else 0.0,
            )
        )
    return works, beside


class _Flights:
    """The samples in flight at each generator over time."""

    def __init__(self, groups: list[GroupTimes], durations: DoubleArray) -> None:
        self._starts = np.array([group.handed_out_s for group in groups])
        self._ends = self._starts + durations
        self._generators: list[tuple[list[int], DoubleArray, DoubleArray]] = []
        members: dict[str, list[int]] = collections.defaultdict(list)
        for index, group in enumerate(groups):
            members[group.generator].append(index)
        for indices in members.values():
            changes = np.concatenate(
                [_changes(groups[i], self._starts[i], self._ends[i]) for i in indices]
            )
            moments, steps = changes[np.argsort(changes[:, 0], kind="stable")].T
            # A single sample is not slowed down, so only further samples count.
            further = np.maximum(np.cumsum(steps)[:-1] - 1, 0.0)
            self._generators.append((indices, moments, further))

    def alone_s(self, beside: float) -> DoubleArray:
        """Return the seconds that each group would have taken with one sample in flight."""
        units = np.zeros(len(self._starts))
        for indices, moments, further in self._generators:
            # At each moment, the seconds since the first one if one sample were in flight.
            spans_s = np.diff(moments) / (1 + beside * further)
            alone_s = np.concatenate([[0.0], np.cumsum(spans_s)])
            begun_s = np.interp(self._starts[indices], moments, alone_s)
            units[indices] = np.interp(self._ends[indices], moments, alone_s) - begun_s
        return units


def _changes(group: GroupTimes, start_s: float, end_s: float) -> DoubleArray:
    """Return [N, 2]: the moments when samples of the group start or finish, and their number."""
    written_s = np.minimum(start_s + group.samples[:, 2].astype(np.float64), end_s)
    begun = [[start_s, float(len(written_s))]]
    return np.concatenate([begun, np.stack([written_s, -np.ones(len(written_s))], axis=1)])


def _fitted(flights: _Flights, tokens: DoubleArray) -> float:
    """Return the slowdown by a further sample with which the time alone is most nearly
    proportional to the tokens of the longest sample; 0 if the number in flight never differed.
    """

    def error(beside: float) -> float:
        ratios = flights.alone_s(beside) / tokens
        # Absolute, not squared: groups next to groups that the end of the recording cut off
        # are far off, and squared they would decide.
        return float(np.mean(np.abs(ratios / np.median(ratios) - 1)))

    # With 1, all time is shared: n samples take n times as long as one.
    low = 0.0
    high = 1.0
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        best = int(np.argmin([error(beside) for beside in grid]))
        low = grid[max(best - 1, 0)]
        high = grid[min(best + 1, _GRID - 1)]
    beside = float(grid[best])
    return beside if error(beside) < _SEEN * error(0.0) else 0.0
