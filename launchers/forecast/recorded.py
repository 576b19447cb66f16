"""The recorded times of a run, in the form in which a simulation draws them.

A group's generation is work that shares its engine with the groups beside it: a group advances by
1 / (alone_s + beside_s x n) units of work per second while n groups are in flight. Both constants
are fitted to the run; the work of a group is its recorded time divided by its own mean of that
denominator, so that the recorded times themselves are reproduced.
"""

from __future__ import annotations

import collections
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rl.buffer.store.times import GroupTimes, group_times, step_times
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.core.types import Purpose
from async_rl.launchers.api.metrics import RowReader

Floats = npt.NDArray[np.float64]
_LEAST_STEPS = 8
_WARM_SHARE = 0.2  # of the steps, in which the run fills its buffer; they are left out of rates


@frozen
class Work:
    """One group. units: seconds of generation if it were alone; scoring_s: from its last token
    until it is stored.
    """

    units: float
    scoring_s: float


@frozen
class Recorded:
    """The times of a run.

    beside: seconds per unit of work and further group in flight, relative to one group alone.
    step_s: of the learner without waits, by step from 1. push_s: from the commit of a step until
    generators have its weights. steps_per_s: measured after the warm-up steps.
    """

    train: tuple[Work, ...]
    evaluation: tuple[Work, ...]
    beside: float
    step_s: tuple[float, ...]
    push_s: float
    num_generators: int
    num_warm: int
    steps_per_s: float


def read_times(run_dir: Path) -> Recorded:
    """Read the recorded times. Raises ConfigError if there are too few."""
    groups = group_times(run_dir)
    committed = step_times(run_dir)
    rows = {int(row["step"]): row for row in RowReader(run_dir).new()}
    steps = [step for step in sorted(committed) if "time/step_s" in rows.get(step, {})]
    if len(steps) < _LEAST_STEPS or not groups:
        raise ConfigError(
            f"{run_dir.name} has {len(steps)} recorded steps; at least {_LEAST_STEPS} are needed to"
            " explain where its time goes"
        )
    own_s = [rows[step]["time/step_s"] - rows[step].get("time/wait_batch_s", 0.0) for step in steps]
    push_s = [rows[step].get("weights/push_s", math.nan) for step in steps]
    works, beside = _works(groups)
    num_warm = max(1, round(_WARM_SHARE * len(steps)))
    span_s = committed[steps[-1]] - committed[steps[num_warm - 1]]
    return Recorded(
        train=tuple(w for w, g in zip(works, groups, strict=True) if g.purpose == Purpose.TRAIN),
        evaluation=tuple(
            w for w, g in zip(works, groups, strict=True) if g.purpose == Purpose.EVAL
        ),
        beside=beside,
        step_s=tuple(max(value, 0.0) for value in own_s),
        push_s=float(np.nanmean(push_s)) if np.isfinite(push_s).any() else 0.0,
        num_generators=len({group.generator for group in groups}),
        num_warm=num_warm,
        steps_per_s=(len(steps) - num_warm) / span_s,
    )


def _works(groups: list[GroupTimes]) -> tuple[list[Work], float]:
    """Return the work of each group, and how much a further group in flight slows one down."""
    durations = np.array([max(group.generation_s, 1e-6) for group in groups])
    tokens = np.array([max(group.num_tokens, 1) for group in groups], dtype=np.float64)
    crowds = _crowds(groups, durations)
    alone_s, beside_s = _fitted(durations, tokens, crowds)
    beside = beside_s / alone_s
    works = [
        Work(
            units=float(duration / (1 + beside * (crowd - 1))),
            scoring_s=max(group.ready_s - group.handed_out_s - group.generation_s, 0.0),
        )
        for group, duration, crowd in zip(groups, durations, crowds, strict=True)
    ]
    return works, beside


def _fitted(durations: Floats, tokens: Floats, crowds: Floats) -> tuple[float, float]:
    """Fit duration = tokens x (alone + beside x (crowd - 1)), with neither below zero."""
    columns = np.stack([tokens, tokens * (crowds - 1)], axis=1)
    (alone_s, beside_s), *_ = np.linalg.lstsq(columns, durations, rcond=None)
    if beside_s <= 0 or np.ptp(crowds) < 1e-9:
        return float(durations.sum() / tokens.sum()), 0.0
    if alone_s <= 0:
        # All time is shared: n groups take n times as long as one.
        return 1.0, 1.0
    return float(alone_s), float(beside_s)


def _crowds(groups: list[GroupTimes], durations: Floats) -> Floats:
    """Return the mean number of groups in flight at its generator during each group's time."""
    starts = np.array([group.handed_out_s for group in groups])
    ends = starts + durations
    crowds = np.ones(len(groups))
    members: dict[str, list[int]] = collections.defaultdict(list)
    for index, group in enumerate(groups):
        members[group.generator].append(index)
    for indices in members.values():
        own_starts, own_ends = np.sort(starts[indices]), np.sort(ends[indices])
        moments = np.concatenate([own_starts, own_ends])
        order = np.argsort(moments, kind="stable")
        moments = moments[order]
        changes = np.where(order < len(indices), 1.0, -1.0)
        counts = np.cumsum(changes)
        areas = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(moments))])
        area = np.interp(ends[indices], moments, areas) - np.interp(starts[indices], moments, areas)
        crowds[indices] = np.maximum(area / durations[indices], 1.0)
    return crowds
