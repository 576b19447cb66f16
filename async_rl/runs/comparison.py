"""Two runs side by side: the first input that differs, their settings, results and times.

Within a step, causes come before effects: the weights that it started with, the prompts, the
sampled tokens, their versions and log-probs, the rewards, the order of the batch, the learning
rate, the other numbers of the learner, the weights after it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer.store.connection import STORE_FILE, Connection
from async_rl.buffer.store.ledger import GroupRow, reading
from async_rl.buffer.store.trajectories import batch_of, batch_rows
from async_rl.composition import schema
from async_rl.composition.schema import changes
from async_rl.core.errors import AsyncRLError, InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.core.types import Group, Trajectory
from async_rl.observability.catalogue import FIRST_SCREEN
from async_rl.runs.metrics import newest_rows
from async_rl.runs.report import Report, Section, Table
from async_rl.runs.samples import Decode, decoder
from async_rl.runs.status import config_of
from async_rl.training.checkpoints import published_checksums

_LEARNING_RATES = ("policy/lr", "value/lr")
# Numbers of the learner that follow from its inputs; times and counters of processes do not.
_LEARNER = ("loss/", "policy/", "value/", "advantage/", "reward/")
_TIMES = ("time/", "stage_s/", "wait_s/", "blocked_s/")
_LEAST_S = 0.001  # of a stage that is listed
_NEWEST_SHARE = 0.2  # of the steps: a mean over them hides the noise of single steps
NOT_OBJECTIVE = ("run_name", "output_dir")

Rows = Mapping[int, Mapping[str, float]]
Pair = tuple[str, str]


def compare(one: Path, other: Path) -> Report:
    """Compare two runs, given by their directories.

    Raises ConfigError if the configuration of one of them cannot be read.
    """
    directories = (one, other)
    settings = {
        path: (schema.show(old), schema.show(new))
        for path, (old, new) in changes(config_of(one), config_of(other)).items()
        if path not in NOT_OBJECTIVE
    }
    first, second = (newest_rows(path, 0) for path in directories)
    try:
        lines = tuple(_divergence(directories, (first, second)))
    # Settings and metrics of a run can be compared without its store.
    except InfrastructureError as error:
        lines = (f"the steps cannot be compared: {error}",)
    results = [name for _, names in FIRST_SCREEN for name in names]
    known = {name for rows in (first, second) for row in rows.values() for name in row}
    times = sorted(name for name in known if name.startswith(_TIMES))
    columns = ("", one.name, other.name)

    def section(title: str, values: Mapping[str, Pair]) -> Section:
        if not values:
            return Section(title=title, lines=("no difference",))
        rows = tuple((name, *pair) for name, pair in values.items())
        return Section(title=title, table=Table(columns=columns, rows=rows))

    return Report(
        title=f"{one.name} and {other.name}",
        sections=(
            Section(lines=lines),
            section("settings", settings),
            section("results", _means(first, second, results, share=_NEWEST_SHARE)),
            section("seconds per step", _means(first, second, times, share=1.0)),
        ),
    )


def _means(one: Rows, other: Rows, names: Sequence[str], *, share: float) -> dict[str, Pair]:
    """Return the mean of each metric over the newest share of the steps, by name."""
    table = {}
    for name in names:
        first = _mean(one, name, share)
        second = _mean(other, name, share)
        if any(abs(value) >= _LEAST_S for value in (first, second)):
            table[name] = (_shown(first), _shown(second))
    return table


def _mean(rows: Rows, name: str, share: float) -> float:
    """Return the mean; NaN if no step has the metric."""
    column = [row.get(name, math.nan) for _, row in sorted(rows.items())]
    # A metric that only some steps report, such as a held-out result, has a mean of those steps.
    known = list(filter(math.isfinite, column))
    if not known:
        return math.nan
    return statistics.fmean(known[-max(1, round(share * len(known))) :])


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _divergence(directories: tuple[Path, Path], metrics: tuple[Rows, Rows]) -> Iterator[str]:
    """Yield the sentences that name the first difference of two runs."""
    names = [path.name for path in directories]
    steps = sorted(step for step in metrics[0].keys() & metrics[1].keys() if step > 0)
    if not steps:
        yield f"{names[0]} and {names[1]} have no step in common yet"
        return
    # One moment of each store, so that a live run does not change during the comparison.
    with contextlib.ExitStack() as stack:
        sides = [
            _Side(
                store=stack.enter_context(reading(path / STORE_FILE)),
                metrics=rows,
                decode=_decoder(path),
                checksums=published_checksums(path),
            )
            for path, rows in zip(directories, metrics, strict=True)
        ]
        not_compared: dict[str, list[int]] = {}
        for step, found in _differences(sides, steps):
            if isinstance(found, str):
                not_compared.setdefault(found, []).append(step)
                continue
            subject, where, values = found
            yield f"the runs first differ at step {step}: {subject}, {where}"
            for name, value in zip(names, values, strict=True):
                yield f"  {name}: {value}"
            # Later differences follow from the first one.
            break
        else:
            yield f"no difference in the {len(steps)} steps that both runs have"
    for reason, missing in not_compared.items():
        yield f"not compared: {reason} (steps {missing[0]} to {missing[-1]})"


def _decoder(run_dir: Path) -> Decode:
    """Return the run's decoder. Without the run's model its tokens are shown by number only."""
    try:
        return decoder(run_dir)
    except AsyncRLError:
        return lambda _: ""


@frozen
class _Side:
    """One run. metrics: rows by step; checksums: of its weights by version."""

    store: Connection
    metrics: Rows
    decode: Decode
    checksums: Mapping[int, int]


Sides = Sequence[_Side]
Difference = tuple[str, str, Pair]
"""The subject, such as `reward`; where in the step; the two values as text."""


def _differences(sides: Sides, steps: Sequence[int]) -> Iterator[tuple[int, Difference | str]]:
    """Yield (step, difference), causes first, or (step, reason why a part is not compared)."""
    for step in steps:
        parts = itertools.chain(
            _weights(sides, "weights before the step", step - 1),
            _batches(sides, step),
            _metrics(sides, step),
            _weights(sides, "weights after the step", step),
        )
        for found in parts:
            yield step, found


def _weights(sides: Sides, subject: str, version: int) -> Iterator[Difference]:
    one, other = (side.checksums.get(version) for side in sides)
    # A version that was not pushed has no checksum; the next pushed version shows the difference.
    if one is not None and other is not None and one != other:
        yield subject, f"checksum of version {version}", (f"{one:x}", f"{other:x}")


def _batches(sides: Sides, step: int) -> Iterator[Difference | str]:
    first, second = (batch_rows(side.store, step) for side in sides)
    if not (first and second):
        yield "the rows of the batch were compacted"
        return
    prompts = [[row.prompt_id for row in rows] for rows in (first, second)]
    if sorted(prompts[0]) != sorted(prompts[1]):
        yield from _of_lists("prompts of the batch", sorted(prompts[0]), sorted(prompts[1]))
        return
    # Groups of one prompt are compared at any position: the order is a later cause.
    pairs = sorted(zip(_by_prompt(first), _by_prompt(second), strict=True))
    one, other = (batch_of(side.store, step) for side in sides)
    if one is None or other is None:
        yield "the trajectories are not stored in both runs (recording=full)"
    else:
        for i, j in pairs:
            yield from _samples(sides, first[i].prompt_id, one[i], other[j])
    # The rows outlive the trajectories.
    for i, j in pairs:
        yield from _rows(first[i], second[j])
    yield from _of_lists("order of the batch", *prompts)


def _samples(sides: Sides, prompt_id: str, first: Group, second: Group) -> Iterator[Difference]:
    samples = itertools.zip_longest(first.trajectories, second.trajectories)
    for index, (one, other) in enumerate(samples):
        where = f"prompt {prompt_id}, sample {index}"
        if one is None or other is None:
            counts = str(len(first.trajectories)), str(len(second.trajectories))
            yield "samples", where, counts
            return
        yield from _tokens(sides, where, one, other)
        if one.score.reward != other.score.reward:
            yield "reward", where, (str(one.score.reward), str(other.score.reward))


def _tokens(sides: Sides, where: str, one: Trajectory, other: Trajectory) -> Iterator[Difference]:
    for subject, left, right in (
        ("sampled token", one.token_ids, other.token_ids),
        ("version of a token", one.versions, other.versions),
        ("log-prob of the generator", one.behavior_logprobs, other.behavior_logprobs),
        ("trained tokens", one.loss_mask, other.loss_mask),
    ):
        position = _first_unequal(left, right)
        if position is None:
            continue
        values = []
        for side, array in zip(sides, (left, right), strict=True):
            value = str(array[position]) if position < len(array) else "the end"
            if subject == "sampled token" and value.isdecimal():
                value += f" {side.decode([int(value)])!r}"
            values.append(value)
        yield subject, f"{where}, token {position}", (values[0], values[1])


def _metrics(sides: Sides, step: int) -> Iterator[Difference]:
    one, other = (side.metrics[step] for side in sides)
    names = [name for name in one if name.startswith(_LEARNER) and name in other]
    # The learning rate is an input of the step.
    for name in sorted(names, key=lambda name: name not in _LEARNING_RATES):
        values = one[name], other[name]
        # NaN, a metric that the step did not report, differs from itself.
        if values[0] != values[1] and not all(map(math.isnan, values)):
            subject = "learning rate" if name in _LEARNING_RATES else "metric"
            yield subject, name, (f"{values[0]:.9g}", f"{values[1]:.9g}")


def _by_prompt(rows: Sequence[GroupRow]) -> list[int]:
    """Return the positions of the groups, ordered by prompt."""
    return sorted(range(len(rows)), key=lambda i: rows[i].prompt_id)


def _rows(one: GroupRow, other: GroupRow) -> Iterator[Difference]:
    for subject, first, second in (
        ("number of tokens", one.num_tokens, other.num_tokens),
        ("oldest version", one.oldest_version, other.oldest_version),
        ("newest version", one.newest_version, other.newest_version),
        ("reward", one.rewards, other.rewards),
    ):
        if first != second:
            yield subject, f"prompt {one.prompt_id}", (str(first), str(second))


def _of_lists(subject: str, first: Sequence[str], second: Sequence[str]) -> Iterator[Difference]:
    """Yield each position where two lists differ."""
    pairs = itertools.zip_longest(first, second, fillvalue="none")
    for index, (one, other) in enumerate(pairs):
        if one != other:
            yield subject, f"group {index}", (one, other)


def _first_unequal(first: Any, second: Any) -> int | None:
    """Return the first position where two arrays differ, or None."""
    size = min(len(first), len(second))
    unequal = np.flatnonzero(first[:size] != second[:size])
    # Arrays that are equal up to the end of the shorter one differ there.
    if len(unequal):
        return int(unequal[0])
    return None if len(first) == len(second) else size
