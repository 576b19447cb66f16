"""The run's store: every prompt, group, state and step in one SQLite file.

Invariants
- The caller queues changes and awaits `flush()`: when it returns, all that was queued before is
  committed (writer.py).
- The statements of one change are in one transaction: the file always contains a prefix of the
  changes.
- One process writes: a second one is refused by a lock on `<path>.lock`, which the kernel releases
  with its process.  Others read at any time (WAL).
- Old groups are replaced by sums (`compact`), so that the ledger of a long run stays small: a
  trained group takes 700 bytes in `groups`, `transitions` and `trained`; its share of the sums of
  its step is one byte. Dropped groups and reported evaluations as old as these steps are counted by
  state and reason, and the samples of such an evaluation are deleted.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from async_rl.buffer import changes
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.reader import StoreReader
from async_rl.buffer.store.writer import PAGE_BYTES, Writer
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup, PackedTrajectory, SampleId
from async_rl.core.types import Purpose

LEAST_FREE_BYTES = 5 * 10**9
_LEAST_FREE_SHARE = 0.1
"""recording=full leaves the smaller of the two (of a disk of 1 TB, 5 GB) to other files."""

_SHOWN_STEPS = 2
"""Newest steps whose trajectories remain stored for people, though no checkpoint needs them."""

KEPT_SAMPLES = 16
"""The number of groups of a reported evaluation whose trajectories stay stored."""

_DELETE_REPORTED = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups WHERE evaluation=:version AND"
    f" position>={KEPT_SAMPLES})"
)
_FORGET = (
    "DELETE FROM blobs WHERE group_id IN (SELECT group_id FROM groups INDEXED BY groups_by_batch"
    " WHERE train_version>=:first AND train_version<:last AND state='trained')"
)

_MOST_STEPS = 1000
"""Compacted steps of one transaction: a resumed run may have many, and puts wait until it is
committed.
"""
_TRAINED = (
    "SELECT group_id FROM trained WHERE step_id IN (SELECT step_id FROM steps WHERE undone_s IS"
    " NULL AND version>:first AND version<=:last)"
)
# Groups that were closed untrained. Only ids below the id of a compacted group are looked at:
# nearly all of these have no rows any more, so no index by state is needed. A resumed run continues
# after the newest id and position, which belong to a group that keeps its sums.
_ENDED = (
    "SELECT group_id FROM groups WHERE group_id < (SELECT max(last_group_id) FROM compacted WHERE"
    " version>:first AND version<=:last) AND (purpose='train' AND state='dropped' AND"
    " coalesce(train_version, 0) < :last OR purpose='eval' AND state IN ('ready', 'dropped') AND"
    " (evaluation IS NULL OR evaluation IN (SELECT version FROM evaluations WHERE finished_s IS NOT"
    " NULL AND version<=:last)))"
)


def _count(kind: str, name: str, groups: str) -> str:
    return (
        f"INSERT INTO compacted_counts SELECT {kind}, {name}, count(*) FROM groups WHERE group_id"
        f" IN ({groups}) GROUP BY 1, 2 ON CONFLICT DO UPDATE SET number = number + excluded.number"
    )


def _delete(groups: str, *tables: str) -> list[str]:
    return [f"DELETE FROM {table} WHERE group_id IN ({groups})" for table in tables]


COMPACTION = (
    # The sums before the deletions: they are computed from the rows.
    "INSERT INTO compacted SELECT steps.version, count(*), max(group_id), max(position),"
    " sum(num_tokens), sum(num_trained_tokens), avg(reward_mean) FROM steps JOIN trained USING"
    " (step_id) JOIN groups USING (group_id) WHERE undone_s IS NULL AND steps.version>:first AND"
    " steps.version<=:last GROUP BY steps.version",
    _count("'age'", "max(train_version - oldest_version, 0)", _TRAINED),
    _count("'generator'", "generator", _TRAINED),
    # The last table is read by the selection of rows in all other tables.
    *_delete(_TRAINED, "transitions", "groups", "reused", "trained"),
    _count("purpose || ' ' || state", "reason", _ENDED),
    *_delete(_ENDED, "transitions", "blobs", "trained", "groups"),
)
"""The SQL that compacts the groups of the steps after :first up to :last, and other groups of that
time that were not trained.
"""


class Store(Writer):
    """The store of the run in this directory, with its one writer and the `reader` of its process.

    clock: Unix seconds.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float]) -> None:
        super().__init__(run_dir / STORE_FILE)
        self.reader = StoreReader(self._path)
        self._files.callback(self.reader.close)
        self._clock = clock
        self._groups: dict[int, PackedGroup] = {}
        # The version before which the learner cannot start any more.
        self.forgotten_before = self.reader.number(
            "SELECT coalesce(max(value), 0) FROM meta WHERE key='forgotten_before'"
        )
        # The last step whose groups were replaced by sums.
        self._compacted = self.reader.number("SELECT coalesce(max(version), 0) FROM compacted")

    def write(self, made: list[changes.Change]) -> None:
        """Queue changes of the state. A complete training group stays in memory until it is
        trained or dropped, so that the learner's reads do not wait for the disk.
        """
        self.put_changes(made, self._clock())
        for change in made:
            match change:
                case changes.Completed(group=group) if group.purpose is Purpose.TRAIN:
                    self._groups[group.group_id] = group
                case changes.Dropped(group_id=group_id):
                    self._groups.pop(group_id, None)
                case changes.Trained():
                    for group_id in (*change.group_ids, *change.reused):
                        self._groups.pop(group_id, None)
                case changes.BatchDropped():
                    for group_id in change.group_ids:
                        self._groups.pop(group_id, None)

    async def groups(self, group_ids: Iterable[int]) -> list[PackedGroup]:
        """Return complete groups with their trajectories. Groups that were put before a restart, or
        trained before, are read from the file once.
        """
        missing = [group_id for group_id in group_ids if group_id not in self._groups]
        if missing:
            groups = await self.reader.groups(missing)
            self._groups.update(zip(missing, groups, strict=True))
        return [self._groups[group_id] for group_id in group_ids]

    async def sequences(
        self, samples: Sequence[SampleId], train_version: int
    ) -> list[PackedTrajectory]:
        """Return samples of complete groups as the learner of this version trains them.

        Later versions in them are weights that were discarded when the learner went back, and
        another batch of that time was dropped since. They count as the version that trains them, as
        the first tokens of an open group do (`BufferState.sync`).
        """
        ids = {group_id for group_id, _ in samples}
        groups = {group.group_id: group for group in await self.groups(ids)}
        return [
            groups[group_id].member(number).as_of(train_version) for group_id, number in samples
        ]

    def finish_evaluation(self, version: int, figures: dict[str, float]) -> None:
        """The metrics of an evaluation were reported: delete its trajectories except a few."""
        text = msgspec.json.encode(figures).decode()
        row = {"version": version, "figures": text, "now_s": self._clock()}
        self.put(
            (
                "UPDATE evaluations SET finished_s=:now_s, figures=:figures WHERE version=:version",
                _DELETE_REPORTED,
            ),
            row,
        )

    def forget_before(self, version: int) -> None:
        """Delete the trajectories of groups trained by steps up to `version`; the learner can then
        no longer go back before it.
        """
        steps = {"first": self.forgotten_before, "last": version}
        self.put(
            (
                _FORGET,
                "INSERT OR REPLACE INTO meta VALUES ('forgotten_before', :last)",
            ),
            steps,
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
        free_bytes = disk.free + self.reader.number("PRAGMA freelist_count") * PAGE_BYTES
        if free_bytes >= min(LEAST_FREE_BYTES, _LEAST_FREE_SHARE * disk.total):
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
        last = min(version, self._compacted + _MOST_STEPS)
        if last > self._compacted:
            self.put(COMPACTION, {"first": self._compacted, "last": last})
            self._compacted = last
