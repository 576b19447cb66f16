"""The first step and the first input in which two recorded runs differ.

Within a step, causes come before effects: the weights that it started with, the prompts, the
sampled tokens, their versions and log-probs, the rewards, the order of the batch, the learning
rate, the other numbers of the learner, the weights after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.buffer.store.batches import Batches, TrainedGroup
from async_rl.core.frozen import frozen
from async_rl.core.types import Group, Trajectory
from async_rl.training.published import read

_LEARNING_RATES = ("policy/lr", "value/lr")
# Numbers of the learner that follow from its inputs; times and counters of processes do not.
_SECTIONS = ("loss/", "policy/", "value/", "advantage/", "reward/")
Decode = Callable[[list[int]], str]


@frozen
class Difference:
    """The first one. subject: of the input or the result, such as `reward`; where: within the step,
    as words; the two values as text.
    """

    step: int
    subject: str
    where: str
    values: tuple[str, str]


@frozen
class Found:
    """num_steps: compared ones, up to the first difference. notes: what could not be compared."""

    difference: Difference | None
    num_steps: int
    notes: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class RecordedRun:
    """One side. metrics: rows by step; decode: token ids to text, for what is shown."""

    run_dir: Path
    batches: Batches
    metrics: Mapping[int, Mapping[str, float]]
    decode: Decode
    checksums: Mapping[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.checksums = read(self.run_dir)


def first_difference(one: RecordedRun, other: RecordedRun, *, steps: Sequence[int]) -> Found:
    """Compare two runs step by step, up to the first difference."""
    walk = _Walk(one, other)
    for number, step in enumerate(steps, start=1):
        difference = next(walk.differences(step), None)
        if difference is not None:
            return Found(difference=difference, num_steps=number, notes=walk.notes)
    return Found(difference=None, num_steps=len(steps), notes=walk.notes)


class _Walk:
    def __init__(self, one: RecordedRun, other: RecordedRun) -> None:
        self._sides = (one, other)
        self._notes: dict[str, list[int]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each kind of record that was missing, with the steps."""
        return tuple(
            f"{what} (steps {steps[0]} to {steps[-1]})" for what, steps in self._notes.items()
        )

    def differences(self, step: int) -> Iterator[Difference]:
        """Yield the differences of a step, causes first."""
        yield from self._weights(step, step - 1, "weights before the step")
        rows = self._sides[0].batches.rows(step), self._sides[1].batches.rows(step)
        if rows[0] and rows[1]:
            yield from self._batches(step, *rows)
        else:
            self._note("the rows of the batch were compacted", step)
        yield from self._metrics(step)
        yield from self._weights(step, step, "weights after the step")

    def _note(self, what: str, step: int) -> None:
        self._notes.setdefault(what, []).append(step)

    def _weights(self, step: int, version: int, subject: str) -> Iterator[Difference]:
        values = [side.checksums.get(version) for side in self._sides]
        if None in values:
            # A version that was not pushed has no checksum; its neighbours show the difference.
            return
        if values[0] != values[1]:
            where = f"checksum of version {version}"
            yield Difference(
                step=step, subject=subject, where=where, values=(f"{values[0]:x}", f"{values[1]:x}")
            )

    def _batches(
        self, step: int, first: list[TrainedGroup], second: list[TrainedGroup]
    ) -> Iterator[Difference]:
        prompts = [[row.prompt_id for row in rows] for rows in (first, second)]
        if sorted(prompts[0]) != sorted(prompts[1]):
            yield _of_lists(step, "prompts of the batch", "group", sorted, *prompts)
            return
        # Groups of one prompt are compared wherever they stand: the order is a later cause.
        trajectories = [side.batches.batch(step) for side in self._sides]
        pairs = _paired(first, second)
        if trajectories[0] is None or trajectories[1] is None:
            self._note("the trajectories are not stored in both runs (recording=full)", step)
        else:
            for i, j in pairs:
                yield from self._samples(
                    step, first[i].prompt_id, trajectories[0][i], trajectories[1][j]
                )
        for i, j in pairs:
            yield from _summaries(step, first[i], second[j])
        if prompts[0] != prompts[1]:
            yield _of_lists(step, "order of the batch", "group", list, *prompts)

    def _samples(
        self, step: int, prompt_id: str, first: Group, second: Group
    ) -> Iterator[Difference]:
        samples = itertools.zip_longest(first.trajectories, second.trajectories)
        for index, (a, b) in enumerate(samples):
            where = f"prompt {prompt_id}, sample {index}"
            if a is None or b is None:
                counts = str(len(first.trajectories)), str(len(second.trajectories))
                yield Difference(step=step, subject="samples", where=where, values=counts)
                return
            yield from self._tokens(step, where, a, b)

    def _tokens(self, step: int, where: str, a: Trajectory, b: Trajectory) -> Iterator[Difference]:
        position = _first_unequal(a.token_ids, b.token_ids)
        if position is not None:
            values = tuple(
                self._shown(side, ids, position)
                for side, ids in zip(self._sides, (a.token_ids, b.token_ids), strict=True)
            )
            yield Difference(
                step=step,
                subject="sampled token",
                where=f"{where}, token {position}",
                values=(values[0], values[1]),
            )
            return
        for subject, left, right in (
            ("version of a token", a.versions, b.versions),
            ("log-prob of the generator", a.behavior_logprobs, b.behavior_logprobs),
            ("trained tokens", a.loss_mask, b.loss_mask),
        ):
            position = _first_unequal(left, right)
            if position is not None:
                yield Difference(
                    step=step,
                    subject=subject,
                    where=f"{where}, token {position}",
                    values=(str(left[position]), str(right[position])),
                )
        if a.score.reward != b.score.reward:
            rewards = str(a.score.reward), str(b.score.reward)
            yield Difference(step=step, subject="reward", where=where, values=rewards)

    @staticmethod
    def _shown(side: RecordedRun, ids: Any, position: int) -> str:
        if position >= len(ids):
            return "the end"
        return f"{ids[position]} {side.decode([int(ids[position])])!r}"

    def _metrics(self, step: int) -> Iterator[Difference]:
        rows = [side.metrics.get(step) for side in self._sides]
        if rows[0] is None or rows[1] is None:
            self._note("a run has no metrics", step)
            return
        names = [name for name in rows[0] if name.startswith(_SECTIONS) and name in rows[1]]
        # The learning rate is an input of the step.
        for name in sorted(names, key=lambda name: name not in _LEARNING_RATES):
            values = rows[0][name], rows[1][name]
            if values[0] != values[1] and not all(map(math.isnan, values)):
                subject = "learning rate" if name in _LEARNING_RATES else "metric"
                texts = f"{values[0]:.9g}", f"{values[1]:.9g}"
                yield Difference(step=step, subject=subject, where=name, values=texts)
                return


def _paired(first: list[TrainedGroup], second: list[TrainedGroup]) -> list[tuple[int, int]]:
    """Pair the groups of the same prompt, the n-th with the n-th."""
    orders = [
        sorted(range(len(rows)), key=lambda i, rows=rows: (rows[i].prompt_id, i))  # type: ignore[misc]
        for rows in (first, second)
    ]
    return sorted(zip(*orders, strict=True))


def _summaries(step: int, a: TrainedGroup, b: TrainedGroup) -> Iterator[Difference]:
    """Yield differences of the rows, which outlive the trajectories."""
    where = f"prompt {a.prompt_id}"
    for subject, values in (
        ("number of tokens", (a.num_tokens, b.num_tokens)),
        ("oldest version", (a.oldest_version, b.oldest_version)),
        ("newest version", (a.newest_version, b.newest_version)),
        ("reward", (a.rewards, b.rewards)),
    ):
        if values[0] != values[1]:
            texts = str(values[0]), str(values[1])
            yield Difference(step=step, subject=subject, where=where, values=texts)


def _of_lists(
    step: int,
    subject: str,
    unit: str,
    arranged: Callable[[list[str]], list[str]],
    first: list[str],
    second: list[str],
) -> Difference:
    """Return the first position at which two lists differ."""
    pairs = itertools.zip_longest(arranged(first), arranged(second), fillvalue="none")
    index, values = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return Difference(step=step, subject=subject, where=f"{unit} {index}", values=values)


def _first_unequal(first: Any, second: Any) -> int | None:
    """Return the first position at which two arrays differ, or None."""
    size = min(len(first), len(second))
    unequal = np.flatnonzero(first[:size] != second[:size])
    if len(unequal):
        return int(unequal[0])
    return None if len(first) == len(second) else size
