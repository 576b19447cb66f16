"""Two runs side by side: the first input that differs, their settings, results and times.

Within a step, causes come before effects: the weights that it started with, the prompts, the
sampled tokens, their versions and log-probs, the rewards, the order of the batch, the learning
rate, the other numbers of the learner, the weights after it.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import batch_of, batch_rows
from async_rl.composition.schema import changes
from async_rl.config.base import show
from async_rl.core.errors import InfrastructureError
from async_rl.core.text import ranges
from async_rl.core.types import DoubleArray
from async_rl.observability.catalogue import FIRST_SCREEN
from async_rl.runs.metrics import newest_rows
from async_rl.runs.report import Report, Section, Table
from async_rl.runs.status import config_of
from async_rl.training.checkpoints import published_checksums

_LEARNING_RATES = ("policy/lr", "value/lr")
# Numbers of the learner that follow from its inputs; times and counters of processes do not.
_LEARNER = ("loss/", "policy/", "value/", "advantage/", "reward/")
_TIMES = ("time/", "stage_s/", "wait_s/", "blocked_s/")
_LEAST_S = 0.001  # of a stage that is listed
_NEWEST_SHARE = 0.2  # of the steps: a mean over them hides the noise of single steps
_SAMPLES = "number of samples"
NOT_OBJECTIVE = ("run_name", "output_dir")

Rows = Mapping[int, Mapping[str, float]]
Pair = tuple[str, str]
Key = tuple[str, str, int]
"""A fact about a step: its subject, such as `reward`; where in the step; the number of the group in
order of the prompts.
"""


def compare(one: Path, other: Path) -> Report:
    """Compare two runs, given by their directories.

    Raises ConfigError if the configuration of one of them cannot be read.
    """
    directories = (one, other)
    settings = {
        path: (show(old), show(new))
        for path, (old, new) in changes(config_of(one), config_of(other)).items()
        if path not in NOT_OBJECTIVE
    }
    first, second = (newest_rows(path, 0) for path in directories)
    try:
        lines = tuple(_divergence(directories, (first, second)))
    # Settings and metrics of a run can be compared without its store.
    except InfrastructureError as error:
        lines = (f"the steps cannot be compared: {error}",)
    results = [name for chart in FIRST_SCREEN.values() for name in chart.metrics]
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
        means = [_mean(rows, name, share) for rows in (one, other)]
        if any(abs(value) >= _LEAST_S for value in means):
            first, second = ("-" if math.isnan(value) else f"{value:.4g}" for value in means)
            table[name] = (first, second)
    return table


def _mean(rows: Rows, name: str, share: float) -> float:
    """Return the mean; NaN if no step has the metric."""
    # A metric that only some steps report, such as a held-out result, has a mean of those steps.
    known = [row[name] for _, row in sorted(rows.items()) if name in row]
    if not known:
        return math.nan
    return statistics.fmean(known[-max(1, round(share * len(known))) :])


def _divergence(directories: tuple[Path, Path], metrics: tuple[Rows, Rows]) -> Iterator[str]:
    """Yield the sentences that name the first difference of two runs."""
    names = [path.name for path in directories]
    steps = sorted(step for step in metrics[0].keys() & metrics[1].keys() if step > 0)
    if not steps:
        yield f"{names[0]} and {names[1]} have no step in common yet"
        return
    # One moment of each store, so that a live run does not change during the comparison.
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(reading(path)) for path in directories]
        checksums = [published_checksums(path) for path in directories]
        sides = list(zip(stores, metrics, checksums, strict=True))
        not_stored = []
        for step in steps:
            one, other = (dict(_facts(*side, step)) for side in sides)
            if not all(any(key[0] == _SAMPLES for key in facts) for facts in (one, other)):
                not_stored.append(step)
            found = next(_differences(one, other), None)
            if found is not None:
                (subject, where, _), position, values = found
                place = where if np.ndim(values[0]) == 0 else f"{where} {position}"
                yield f"the runs first differ at step {step}: {subject}, {place}"
                for name, value in zip(names, values, strict=True):
                    yield f"  {name}: {_text(np.atleast_1d(value)[position:])}"
                # Later differences follow from the first one.
                break
        else:
            yield f"no difference in the {len(steps)} steps that both runs have"
    if not_stored:
        yield (
            f"not compared: the trajectories are not stored in both runs (recording=full; steps"
            f" {ranges(not_stored)})"
        )


def _facts(
    store: Connection, metrics: Rows, checksums: Mapping[int, int], step: int
) -> Iterator[tuple[Key, Any]]:
    """Yield the facts of a step, causes first. A value is one number or text, or a sequence.

    checksums: of the weights by version.
    """
    yield from _weights(checksums, "weights before the step", step - 1)
    rows = batch_rows(store, step)
    # Groups of one prompt are compared at any position: the order is a later cause.
    by_prompt = sorted(range(len(rows)), key=lambda i: rows[i].prompt_id)
    prompts = [row.prompt_id for row in rows]
    if rows:
        yield ("prompts of the batch", "group", 0), sorted(prompts)
    groups = batch_of(store, step) or []
    for number, i in enumerate(by_prompt if groups else ()):
        yield (_SAMPLES, f"prompt {prompts[i]}", number), len(groups[i].trajectories)
        for index, sample in enumerate(groups[i].trajectories):
            where = f"prompt {prompts[i]}, sample {index}, token"
            yield ("sampled token", where, number), sample.token_ids
            yield ("version of a token", where, number), sample.versions
            yield ("log-prob of the generator", where, number), sample.behavior_logprobs
            yield ("trained tokens", where, number), sample.loss_mask
    # The rows outlive the trajectories.
    for number, i in enumerate(by_prompt):
        row = rows[i]
        where = f"prompt {row.prompt_id}"
        yield ("number of tokens", where, number), row.num_tokens
        yield ("oldest version", where, number), row.oldest_version
        yield ("newest version", where, number), row.newest_version
        yield ("reward", f"{where}, sample", number), row.rewards
    if rows:
        yield ("order of the batch", "group", 0), prompts
    # The learning rate is an input of the step.
    for name in sorted(metrics[step], key=lambda name: name not in _LEARNING_RATES):
        if name.startswith(_LEARNER):
            subject = "learning rate" if name in _LEARNING_RATES else "metric"
            yield (subject, name, 0), metrics[step][name]
    yield from _weights(checksums, "weights after the step", step)


def _weights(checksums: Mapping[int, int], subject: str, version: int) -> Iterator[tuple[Key, str]]:
    # A version that was not pushed has no checksum; the next pushed version shows the difference.
    if version in checksums:
        yield (subject, f"checksum of version {version}", 0), f"{checksums[version]:x}"


def _differences(
    first: Mapping[Key, Any], second: Mapping[Key, Any]
) -> Iterator[tuple[Key, int, tuple[Any, Any]]]:
    """Yield (fact, first position where its two values differ, the values), causes first."""
    for key in filter(second.__contains__, first):
        one, other = np.atleast_1d(first[key], second[key])
        size = min(len(one), len(other))
        left = one[:size]
        right = other[:size]
        unequal = np.flatnonzero(left != right)
        if len(unequal):
            yield key, int(unequal[0]), (first[key], second[key])
        # Arrays that are equal up to the end of the shorter one differ there.
        elif len(one) != len(other):
            yield key, size, (first[key], second[key])


def _text(values: DoubleArray) -> str:
    """Return the first of these values for people."""
    if not len(values):
        return "none"
    value = values[0]
    return f"{value:.9g}" if isinstance(value, float) else str(value)
