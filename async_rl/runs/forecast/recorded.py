"""The recorded times of a run, in the form that a simulation draws.

An engine writes one token of each sample in flight per step, and a step with n samples takes
1 + beside x (n - 1) times as long as one with a single sample; `beside` is fitted to the run. Where
the recording does not determine it, or the share of a step that grows with its tokens, there are
times with the least and the largest value that it may have. The work of a group is the time that it
would have taken alone: its recorded time, each second divided by that factor. A group is complete
with its longest sample; until then it has on average the sum of its lengths divided by the longest
in flight. While a run warms up, its verifiers still start and its first samples wait for them, so
the work of its first steps is left out.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from async_rl.buffer.store.trajectories import (
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
_ERRORS = 2.0  # standard errors to each side of a fitted number: 95 % if they are normal
# Steps of 1/8, then 1/32, ... of the range: 0.0001 in the end.
_GRID = 9
_ROUNDS = 6
_WIDE = 41  # values that are tried, denser where they are small
_ROUNDING = 1e-6  # of the mean error of a fit, which is relative
WARM_SHARE = 0.2  # of the steps: the run fills its buffer; left out of rates and of the work


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
    a batch. push_s: from the commit of a step until generators have its weights. steps_per_s:
    measured after the warm-up steps; error: its standard error, relative. num_eval_groups: of one
    evaluation. places_per_unit: places of a verifier for each unit of the setting.
    learner_waits, generators_idle: measured shares of time, as in `Forecast`; NaN if unknown.
    cut_tokens: length of responses that a longer limit may lengthen to it, 0 for none.
    """

    train: tuple[Work, ...]
    evaluation: tuple[Work, ...]
    beside: float
    step_s: tuple[float, ...]
    push_s: float
    num_generators: int
    num_warm: int
    steps_per_s: float
    by_tokens: float = 1.0
    error: float = 0.0
    num_eval_groups: int = 0
    places_per_unit: int = 1
    learner_waits: float = math.nan
    generators_idle: float = math.nan
    cut_tokens: int = 0


_Works = tuple[tuple[Work, ...], tuple[Work, ...], float]
"""The work of groups that train and of evaluations, with the slowdown `beside`."""


def read_times(run_dir: Path, config: RunConfig) -> list[Recorded]:
    """Read the times of the newest groups: the likeliest, then those that are as possible. Raises
    ConfigError if there are too few steps.
    """
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
    scores, places_per_unit = read_scoring(groups, config)
    every = config.evaluation.every_steps
    # A recording from the first step on has an evaluation of the start model too.
    num_evaluations = len(steps) // every + (steps[0] == 1) if every else 0
    num_eval_groups = sum(group.purpose == Purpose.EVAL for group in groups)
    # At least one step, whose commit is where the first measured span starts.
    num_warm = max(1, round(WARM_SHARE * len(steps)))
    measured_s = [committed[step] for step in steps[num_warm - 1 :]]
    # Steps in which a learner started include the time when the run was stopped.
    spans_s = [
        end_s - begin_s
        for begin_s, end_s in itertools.pairwise(measured_s)
        if not any(begin_s < at_s <= end_s for at_s in lives_s)
    ] or [measured_s[-1] - measured_s[0]]
    (train, evaluation, beside), *others = works_of(groups, scores, since_s=measured_s[0])
    share, *shares = _share_by_tokens(own_s, column("length/response_mean", math.nan)).tolist()
    generating_s = column("stage_s/generator/generating", math.nan)
    likeliest = Recorded(
        train=train,
        evaluation=evaluation,
        beside=beside,
        step_s=tuple(np.maximum(own_s, 0.0).tolist()),
        # Not every row has a push.
        push_s=float(np.nanmean(push_s)) if np.isfinite(push_s).any() else 0.0,
        num_generators=len({group.generator for group in groups}),
        num_warm=num_warm,
        steps_per_s=len(spans_s) / sum(spans_s),
        by_tokens=share,
        error=float(np.std(spans_s) / np.mean(spans_s) / len(spans_s) ** 0.5),
        num_eval_groups=round(num_eval_groups / max(num_evaluations, 1)),
        places_per_unit=places_per_unit,
        learner_waits=float(1 - own_s.sum() / whole_s.sum()),
        generators_idle=float(1 - generating_s.sum() / whole_s.sum()),
    )
    return [likeliest, *_alternatives(likeliest, others, shares, config.data.max_response_tokens)]


def _alternatives(
    likeliest: Recorded, works: Iterable[_Works], shares: Sequence[float], limit: int
) -> Iterator[Recorded]:
    """Yield the times with the other values that the recording allows. works, shares: the least and
    the largest; limit: tokens of a response.
    """
    is_cut = any(max(work.lengths, default=0) >= limit for work in likeliest.train)
    for own, share, cut in itertools.product(works, shares, {0, limit * is_cut}):
        train, evaluation, beside = own
        yield replace(
            likeliest,
            train=train,
            evaluation=evaluation,
            beside=beside,
            by_tokens=share,
            cut_tokens=cut,
        )


def _share_by_tokens(own_s: DoubleArray, lengths: DoubleArray) -> DoubleArray:
    """Fit own_s = a + b x length; return the share of b, its least and its largest value. All of
    the time is assumed to grow if the fit is undetermined.
    """
    # Relative lengths, so that slope and constant are both seconds.
    x = lengths / lengths.mean()
    if np.isfinite(x).all() and np.ptp(x) >= _LEAST_SPREAD:
        (slope, _), covariance = np.polyfit(x, own_s, 1, cov=True)
        error = covariance[0, 0] ** 0.5
        # A slope that the recording does not determine extrapolates noise to other batch sizes.
        if error <= _LARGEST_ERROR * own_s.mean():
            slopes = slope + _ERRORS * error * np.array([0, -1, 1])
            shares: DoubleArray = (slopes / own_s.mean()).clip(0.0, 1.0)
            return shares
    return np.array([1.0, 0.0, 1.0])


def works_of(
    groups: list[GroupTimes], scores: Sequence[tuple[float, ...]], since_s: float = -math.inf
) -> list[_Works]:
    """Return the work of groups that train, of those of evaluations, and how much a further sample
    in flight slows a step: for the likeliest slowdown, the least and the largest that the recording
    allows. scores: seconds of scoring, of each group. since_s: groups that started earlier are left
    out, unless no other has their purpose.
    """
    durations = np.array([max(group.generation_s, 1e-6) for group in groups])
    lengths = [[max(int(length), 1) for length in group.samples[:, 0]] for group in groups]
    longest = np.array([max(own) for own in lengths], dtype=np.float64)
    flights = _Flights(groups, durations)
    warm = {group.purpose for group in groups if group.handed_out_s >= since_s}
    found = []
    for beside in _fitted(flights, longest):
        works: dict[str, list[Work]] = {Purpose.TRAIN: [], Purpose.EVAL: []}
        units = flights.alone_s(beside).tolist()
        for index, group in enumerate(groups):
            if group.handed_out_s < since_s and group.purpose in warm:
                continue
            duration = float(durations[index])
            after_s = max(group.ready_s - group.handed_out_s - duration, 0.0)
            first_s = group.samples[:, 1]
            known = first_s[np.isfinite(first_s)]
            _, _, written_s, scored_s = group.samples.max(axis=0)
            scoring_s = min(max(float(scored_s - written_s), 0.0), after_s)
            own = lengths[index]
            works[group.purpose].append(
                Work(
                    units=units[index],
                    scoring_s=scoring_s,
                    storing_s=after_s - scoring_s,
                    load=sum(own) / max(own),
                    lengths=tuple(own),
                    first=min(float(known.min()) / duration, 1.0) if len(known) else 0.0,
                    scores=scores[index],
                )
            )
        train, evaluation = map(tuple, works.values())
        found.append((train, evaluation, beside))
    return found


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
    ended = np.stack([written_s, -np.ones(len(written_s))], axis=1)
    return np.concatenate([begun, ended])


def _fitted(flights: _Flights, tokens: DoubleArray) -> list[float]:
    """Return the slowdown by a further sample with which the time alone is most nearly proportional
    to the tokens of the longest sample, its least and its largest value. It is 0 if no other is
    nearer, and anything from 0 to 1 if the number in flight never differed.
    """

    def errors(beside: float) -> DoubleArray:
        ratios = flights.alone_s(beside) / tokens
        # Absolute, not squared: groups next to groups that the end of the recording cut off
        # are far off, and squared they would decide.
        distances: DoubleArray = np.abs(ratios / np.median(ratios) - 1)
        return distances

    # With 1, all time is shared: n samples take n times as long as one.
    low = 0.0
    high = 1.0
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        best = int(np.argmin([errors(beside).mean() for beside in grid]))
        low = grid[max(best - 1, 0)]
        high = grid[min(best + 1, _GRID - 1)]
    beside = float(grid[best])
    least = errors(beside)
    if errors(0.0).mean() - least.mean() < _ROUNDING:
        beside = 0.0
    possible = [beside]
    for other in np.linspace(0, 1, _WIDE) ** 2:
        worse = errors(float(other)) - least
        # Differences of the same groups, so that what is common to both does not count.
        if worse.mean() <= _ERRORS * worse.std() / len(worse) ** 0.5 + _ROUNDING:
            possible.append(float(other))
    return [beside, min(possible), max(possible)]
