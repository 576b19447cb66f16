"""The report of `async-rl replay`: each step next to the recorded step, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from async_rl.runs.metrics import newest_rows
from async_rl.runs.report import Report, Section, Table
from async_rl.training.checkpoints import published_checksums

_SAMPLE_SIZE = "policy/effective_sample_size"
_COLUMNS = {
    "loss": "loss/policy",
    "grad norm": "policy/grad_norm",
    "entropy": "policy/entropy",
    "sample size": _SAMPLE_SIZE,
}
_BELIEVABLE = 0.5
"""Effective share of samples below which a curve says little: half of the data no longer count."""
_DATA = (
    "the responses come from the recorded policy, and the replayed policy differs from it more with"
    " every step"
)


def replayed(run_dir: Path, directory: Path, *, is_changed: bool) -> tuple[Report, bool]:
    """Return the report, and whether a replay without changes has other weights than the run.

    directory: of the replay, whose metrics and checksums have the form of a run's.
    """
    recorded = newest_rows(run_dir, 1)
    rows = newest_rows(directory, 1)
    published = published_checksums(run_dir)
    own = published_checksums(directory)
    # A run writes checksums of published versions only (weights.push_every_steps).
    states = {
        step: "equal" if own[step] == published[step] else "differ"
        for step in own
        if step in published
    }
    different = [step for step, state in states.items() if state == "differ"]
    table = tuple(
        (
            str(step),
            *(
                _change(recorded.get(step, {}).get(name), row.get(name))
                for name in _COLUMNS.values()
            ),
            states.get(step, "not recorded"),
        )
        for step, row in rows.items()
    )
    if is_changed:
        verdict = _belief({step: row.get(_SAMPLE_SIZE, math.nan) for step, row in rows.items()})
    elif different:
        verdict = (
            f"the weights differ from the run's from step {different[0]} on: other code, hardware,"
            " number of threads or ranks, or settings that changed at a resume (config.<n>.yaml)"
        )
    elif states:
        verdict = f"the weights equal the run's at all {len(states)} compared steps"
    else:
        verdict = (
            "the run has no checksums of these versions (versions.jsonl), so the weights were not"
            " compared"
        )
    seconds = max((row["time_s"] for row in rows.values()), default=0.0)
    report = Report(
        title="",
        sections=(
            Section(table=Table(columns=("step", *_COLUMNS, "weights"), rows=table)),
            Section(lines=(f"{len(rows)} steps in {seconds:.1f} s", verdict)),
        ),
    )
    return report, bool(different) and not is_changed


def _belief(sizes: Mapping[int, float]) -> str:
    """Say how far curves of other settings on the same data may be believed. sizes: the effective
    share of samples by step.
    """
    low = [step for step, size in sizes.items() if size < _BELIEVABLE]
    if low:
        return (
            f"{_DATA}: from step {low[0]} on fewer than half of the samples count (sample size"
            f" {sizes[low[0]]:.2f}), so later values say little about a run with these settings"
        )
    smallest = min(sizes.values(), default=math.nan)
    return (
        f"{_DATA}; the smallest effective sample size is {smallest:.2f} of 1, so the values"
        " describe how these settings learn from this data, not the responses that they would have"
        " led to"
    )


def _change(old: float | None, new: float | None) -> str:
    if new is None:
        return "-"
    # One number where both agree, so that differences are seen.
    if old is None or old == new:
        return f"{new:.4g}"
    return f"{old:.4g} -> {new:.4g}"
