"""The run's store: every prompt, group, state and step in one SQLite file.

Invariants
- The caller queues changes and awaits `flush()`: when it returns, all that was queued before is
  committed (writer.py).
- The statements of one change are in one transaction: the file always contains a prefix of the
  changes.
- One process writes: a second one is refused by a lock on `<path>.lock`, which the kernel releases
  with its process.  Others read at any time (WAL).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

import numpy as np

from async_rl.buffer import changes
from async_rl.buffer.store.compaction import MOST_STEPS, compaction
from async_rl.buffer.store.reader import StoreReader
from async_rl.buffer.store.statements import statements_of, to_json
from async_rl.buffer.store.writer import Writer, hold_lock
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import SampleId
from async_rl.core.types import FloatArray, Group, Purpose

_LEAST_FREE_BYTES = 5 * 10**9
_LEAST_FREE_SHARE = 0.1
"""recording=full leaves the smaller of the two (of a disk of 1 TB, 5 GB) to other files."""

_SHOWN_STEPS = 2
"""Newest steps whose trajectories remain stored for people, though no checkpoint needs them."""

KEPT_SAMPLES = 16
"""The number of groups of a reported evaluation whose trajectories stay stored."""

_ADVANTAGES = "INSERT OR REPLACE INTO advantages SELECT group_id, ?, ? FROM blobs WHERE group_id=?"
_REPORT = "UPDATE evaluations SET finished_s=?, figures=? WHERE version=?"
_DELETE_REPORTED = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups WHERE evaluation=? AND"
    " position>=?)"
)
_FORGET = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups INDEXED BY groups_by_batch"
    " WHERE train_version>=? AND train_version<? AND state='trained')"
)
_FORGET_ADVANTAGES = "DELETE FROM advantages WHERE group_id NOT IN (SELECT group_id FROM blobs)"
_FORGOTTEN = "INSERT OR REPLACE INTO meta VALUES ('forgotten_before', ?)"


class Store(StoreReader):
    """The store with its one writer. Use it as an async context manager.

    clock: Unix seconds.
    """

    def __init__(
        self, path: Path, *, durability: Literal["normal", "full"], clock: Callable[[], float]
    ) -> None:
        with contextlib.ExitStack() as stack:
            # First: a second process must not even create tables or recover the log.
            stack.enter_context(hold_lock(path))
            self._writer = Writer(path, durability=durability)
            stack.callback(self._writer.close_file)
            super().__init__(path)
            stack.callback(self.close_reader)
            self._clock = clock
            self._groups: dict[int, Group] = {}
            self._files = stack.pop_all()

    def write(self, change: changes.Change) -> None:
        """Queue a change of the state. A complete training group stays in memory until it is
        trained or dropped, so that the learner's reads do not wait for the disk.
        """
        self._writer.put(*statements_of(change, self._clock()))
        match change:
            case changes.Completed(group=group) if group.purpose is Purpose.TRAIN:
                self._groups[group.group_id] = group
            case changes.Dropped(group_id=group_id):
                self._groups.pop(group_id, None)
            case changes.Trained(group_ids=group_ids) | changes.BatchDropped(group_ids=group_ids):
                for group_id in group_ids:
                    self._groups.pop(group_id, None)

    async def groups(self, group_ids: Iterable[int]) -> list[Group]:
        """Return complete groups that are not trained yet, with their trajectories. Groups that
        were put before a restart are read from the file once.
        """
        missing = [group_id for group_id in group_ids if group_id not in self._groups]
        if missing:
            groups = await self.read_groups(missing)
            self._groups.update(zip(missing, groups, strict=True))
        return [self._groups[group_id] for group_id in group_ids]

    def keep_advantages(self, advantages: Iterable[tuple[SampleId, FloatArray]]) -> None:
        """Queue (sample, advantage of each response token) of groups whose trajectories are stored.
        Only people read them.
        """
        for (group_id, number), values in advantages:
            # float16 has three digits, which is enough for people, in half the bytes of float32.
            payload = values.astype(np.float16).tobytes()
            self._writer.put((_ADVANTAGES, (number, payload, group_id)))

    def finish_evaluation(self, version: int, figures: dict[str, float]) -> None:
        """The metrics of an evaluation were reported: delete its trajectories except a few."""
        self._writer.put(
            (_REPORT, (self._clock(), to_json(figures), version)),
            (_DELETE_REPORTED, (version, KEPT_SAMPLES)),
        )

    def forget_before(self, version: int) -> None:
        """Delete the trajectories of groups trained by steps up to `version`; the learner can then
        no longer go back before it.
        """
        self._writer.put(
            (_FORGET, (self.forgotten_before, version)),
            (_FORGET_ADVANTAGES, ()),
            (_FORGOTTEN, (version,)),
        )
        self.forgotten_before = version

    def last_not_kept(self, recording: Literal["off", "times", "full"], trained: int) -> int:
        """Return the last step whose trajectories `recording` does not keep; trained: the newest.

        While the disk is nearly full, full does not keep the oldest tenth.
        """
        if recording == "off":
            return trained
        last = trained - _SHOWN_STEPS
        if recording == "times":
            return last
        disk = shutil.disk_usage(self._path.parent)
        # Deleted rows leave pages that later ones fill; the file does not shrink.
        free_bytes = disk.free + self._one("PRAGMA freelist_count") * self._one("PRAGMA page_size")
        if free_bytes >= min(_LEAST_FREE_BYTES, _LEAST_FREE_SHARE * disk.total):
            return self.forgotten_before
        return min(last, self.forgotten_before - (self.forgotten_before - trained) // 10)

    def require_history_of(self, version: int) -> None:
        """Raise ProtocolError if trajectories of steps after this version are deleted."""
        if version < self.forgotten_before:
            raise ProtocolError(
                f"the learner starts at version {version}, but the trajectories of steps up to"
                f" {self.forgotten_before} are deleted, because a newer checkpoint contained them;"
                " restore that checkpoint"
            )

    def compact(self, version: int) -> None:
        """Replace the rows of the groups that steps up to `version` trained by sums, some steps at
        a time; their trajectories must be deleted.
        """
        # The next call compacts the rest.
        last = min(version, self.compacted_steps + MOST_STEPS)
        if last > self.compacted_steps:
            self._writer.put(*compaction(self.compacted_steps, last))
            self.compacted_steps = last

    async def flush(self) -> None:
        """Wait until everything queued so far is committed. Raises InfrastructureError if it could
        not be.
        """
        await self._writer.flush()

    async def secure(self) -> None:
        """Return once everything queued so far is on the disk. Raises InfrastructureError if it
        could not be written.
        """
        await self._writer.flush()
        # In a thread: a sync of a busy disk takes seconds, and requests for work must not wait.
        await asyncio.to_thread(self._writer.sync_files)

    async def failed(self) -> None:
        """Wait until the store fails, and raise its InfrastructureError."""
        await self._writer.failed()

    async def close(self) -> None:
        """Commit the queue and close the file."""
        await self._writer.finish()
        self._files.close()

    async def __aenter__(self) -> Self:
        self._writer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
