"""The prompts of a run in `<run>/prompts.sqlite`, ready to be issued.

The preparation of a run writes the file (prompts.py), the buffer reads it by row.
So the buffer has no reader of data files, and the memory of either does not grow with the data.
Invariants
- The file is complete or absent: it is written under another name and renamed.
- A resumed run reads the same prompts, even if the data files have changed since.
- Every epoch contains every prompt that has not left, once, or each data source by its weight; the
  same arguments and the same leavers produce the same order in any process and after any restart; a
  leaver changes no position before the first epoch without it. So the buffer stores positions,
  leavers, and rows that were chosen in place of the order's.
"""

from __future__ import annotations

import bisect
import functools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from async_rl.config.run import RunConfig
from async_rl.core.codec import decode
from async_rl.core.frozen import frozen
from async_rl.core.types import Prompt, Purpose

PROMPTS_FILE = "prompts.sqlite"
"""Its name in the run's directory."""
_NUM_KEPT = 4096
"""Training prompts kept in memory: a group's prompt is read several times within a few steps."""


@frozen
class RunPrompts:
    """Training prompts with their order, and the prompts of one evaluation.

    train: returns the prompt of a row. vocabulary_size: of the model; no token id reaches it.
    """

    train: Callable[[int], Prompt]
    order: PromptOrder
    held_out: Sequence[Prompt]
    vocabulary_size: int

    @property
    def num_held_out(self) -> int:
        """Prompts of one evaluation."""
        return len(self.held_out)

    def prompt(self, purpose: Purpose, index: int) -> Prompt:
        """Return the index-th prompt of the purpose's order."""
        if purpose is Purpose.TRAIN:
            return self.train(self.order.index(index))
        return self.held_out[index]


def open_prompts(path: Path, config: RunConfig, *, vocabulary_size: int) -> RunPrompts:
    """Return the prompts of the run, which stay in the file except for the held-out prompts."""
    connection = opened(path)

    @functools.lru_cache(maxsize=_NUM_KEPT)
    def train(row: int) -> Prompt:
        query = f"SELECT prompt FROM {Purpose.TRAIN} WHERE row=?"
        [(prompt,)] = connection.execute(query, (row,))
        return decode(prompt, Prompt)

    # Not count(*), which reads the whole file.
    [(num_rows,)] = connection.execute(f"SELECT ifnull(max(row) + 1, 0) FROM {Purpose.TRAIN}")
    held_out = connection.execute(f"SELECT prompt FROM {Purpose.EVAL} ORDER BY row")
    weights = sorted(config.data.weights.items())
    order = PromptOrder(
        config.seed,
        num_rows,
        shuffle=config.data.order != "sequential",
        sources=[(_rows_of(connection, source), weight) for source, weight in weights],
    )
    return RunPrompts(
        train=train,
        order=order,
        held_out=[decode(prompt, Prompt) for (prompt,) in held_out],
        vocabulary_size=vocabulary_size,
    )


def opened(path: Path) -> sqlite3.Connection:
    """Return a connection to the complete file."""
    # Nobody writes a file of this name, so no locks are needed, which some shared filesystems lack.
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def _rows_of(connection: sqlite3.Connection, source: str) -> NDArray[np.int64]:
    """Return the rows of the training prompts of a data source, ascending."""
    query = f"SELECT row FROM {Purpose.TRAIN} WHERE data_source=? ORDER BY row"
    return np.array(connection.execute(query, (source,)).fetchall(), np.int64).ravel()


class PromptOrder:
    """The endless order of `n` prompts; without `shuffle` every epoch is 0, 1, ..., n - 1.

    sources: the rows of each data source and its weight; if there are any, an epoch has about `n`
    prompts, of each source by its weight, and each source continues where the last epoch ended,
    so that its prompts take turns. A row that was chosen for a position (`choose`) replaces the row
    of the order.
    """

    def __init__(
        self,
        seed: int,
        n: int,
        *,
        shuffle: bool = True,
        sources: Sequence[tuple[NDArray[np.int64], float]] = (),
    ) -> None:
        self._seed = seed
        self._shuffle = shuffle
        total = sum(weight for _, weight in sources)
        self._parts = [(rows, max(round(n * weight / total), 1)) for rows, weight in sources]
        self._chosen: dict[int, int] = {}
        # The largest integer stands for "never left", so that a comparison with an epoch needs no
        # special case.
        self._left_epoch = np.full(n, np.iinfo(np.int64).max)
        size = sum(num_rows for _, num_rows in self._parts) or n
        self._eras: list[tuple[int, int, int]] = [(0, 0, size)]
        """(first position, first epoch, prompts per epoch) of each stretch without leavers."""
        # Only the present epoch's order is kept: 8 bytes a prompt, 80 MB for ten million.
        self._epoch = -1
        self._members: NDArray[np.int64] = np.arange(n)

    @property
    def active(self) -> NDArray[np.int64]:
        """The prompts that have not left, ascending."""
        return np.flatnonzero(self._left_epoch == np.iinfo(np.int64).max)

    @property
    def num_rows(self) -> int:
        """All prompts, those that left included."""
        return len(self._left_epoch)

    def index(self, k: int) -> int:
        """Index of the k-th prompt, k counted from 0 across epochs."""
        return self._chosen[k] if k in self._chosen else self.drawn(k)

    def choose(self, k: int, rows: Iterable[int]) -> None:
        """The prompts from position k on are these."""
        self._chosen.update(enumerate(rows, start=k))

    def is_chosen(self, k: int) -> bool:
        """Whether a row was chosen for this position."""
        return k in self._chosen

    def restore(
        self, left: Iterable[tuple[int, Sequence[int]]], chosen: Iterable[tuple[int, int]]
    ) -> None:
        """Repeat what was decided before any prompt is read: (position, indices) of prompts that
        left, oldest first, and (position, row) of chosen prompts.
        """
        for position, indices in left:
            self.remove(indices, position)
        self._chosen.update(chosen)

    def drawn(self, k: int) -> int:
        """As `index`, whatever was chosen. The last epoch's order is kept, no other."""
        epoch, offset = self._locate(k)
        if epoch != self._epoch:
            order = np.arange(len(self._left_epoch))
            if self._parts:
                order = np.concatenate([self._stretch(*part, epoch) for part in self._parts])
            if self._shuffle:
                # Shuffle those that left too: a leaver must not change an earlier order.
                order = np.random.default_rng([self._seed, epoch]).permutation(order)
            self._members = order[self._left_epoch[order] > epoch]
            self._epoch = epoch
        return int(self._members[offset])

    def _stretch(self, rows: NDArray[np.int64], num_rows: int, epoch: int) -> NDArray[np.int64]:
        """The rows of one data source in an epoch: a stretch of its passes over its rows."""
        first, start = divmod(epoch * num_rows, len(rows))
        end = (epoch + 1) * num_rows
        last = (end - 1) // len(rows)
        passes = [
            np.random.default_rng([self._seed, int(rows[0]), number]).permutation(rows)
            for number in range(first, last + 1)
        ]
        stretch: NDArray[np.int64] = np.concatenate(passes)[start : start + num_rows]
        return stretch

    def may_lose_at(self, k: int) -> bool:
        """Return whether prompts may be removed at position k: an epoch other than the first starts
        there, and the order after it is not fixed yet.
        """
        return k > self._eras[-1][0] and self._locate(k)[1] == 0

    def remove(self, indices: Sequence[int], k: int) -> None:
        """These prompts are left out from position k on, where `may_lose_at` is true. Some of the
        active ones must remain.
        """
        epoch, _ = self._locate(k)
        self._left_epoch[list(indices)] = epoch
        self._eras.append((k, epoch, len(self.active)))
        self._epoch = -1

    def _locate(self, k: int) -> tuple[int, int]:
        """Epoch of position k, and the offset in it."""
        era = bisect.bisect_right(self._eras, k, key=lambda era: era[0]) - 1
        start, epoch, size = self._eras[era]
        ahead, offset = divmod(k - start, size)
        return epoch + ahead, offset
