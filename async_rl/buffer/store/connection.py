"""Connections to a run's store, its values as objects, and the reads of its buffer.

A column `name [stored_json]` of a query is decoded JSON, and `name [stored_group]` a PackedGroup.
The function `checksum` of SQL is the one of core/checksums.py.
"""

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from async_rl.buffer.groups import OpenGroup, Recovered, StoredGroup
from async_rl.core.checksums import checksum
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.heads import PackedGroup, read_group
from async_rl.core.types import NO_VERSION, DropReason, Purpose

STORE_FILE = "store.sqlite"
"""Its name in the run's directory."""
T = TypeVar("T")
Connection = sqlite3.Connection
Values = Sequence[Any] | Mapping[str, Any]
"""The parameters of a query, by position or by name."""
DAMAGE = (sqlite3.Error, UnicodeError, msgspec.DecodeError)
"""Errors that a damaged file may raise at a read."""
PAYLOAD = (
    "iif(checksum(payload, group_id)=blobs.checksum, payload, NULL) AS 'payload [stored_group]'"
    " FROM blobs"
)
"""Part of a query: the trajectories, None if they are damaged."""
BUSY_MS = 30_000  # a person who reads with plain SQL may lock the file for a while

LEARNER_VERSION = "SELECT coalesce(max(version), 0) FROM steps WHERE undone_s IS NULL"
# The newest group may be compacted while an older one, which it overtook, is not.
_NEXT_GROUP = (
    "SELECT max(coalesce((SELECT max(group_id) FROM groups), -1), coalesce((SELECT"
    " max(last_group_id) FROM compacted), -1)) + 1"
)
NEXT_INDEX = (
    "SELECT max(coalesce((SELECT position FROM groups WHERE purpose='train' ORDER BY group_id DESC"
    " LIMIT 1), -1), coalesce((SELECT max(last_position) FROM compacted), -1)) + 1"
)
# Without INDEXED BY, SQLite may scan the table, which takes seconds in a long run.
_OPEN_ROWS = "groups INDEXED BY groups_open WHERE state IN ('issued', 'generating')"
# The row keeps the generator of the last attempt for the ledger, but no generator works on an
# issued group.
_OPEN = (
    "SELECT group_id, purpose, position AS \"index\", state, attempt, iif(state='issued', '',"
    " generator) AS generator, iif(state='issued', '', incarnation) AS incarnation, version,"
    f" coalesce(evaluation, {NO_VERSION}) AS evaluation, (SELECT count(*) FROM transitions WHERE"
    f" group_id=groups.group_id AND reason IN ('{DropReason.SCORING_OUTAGE}',"
    f" '{DropReason.NOT_TAKEN}')) AS num_spared FROM {_OPEN_ROWS} ORDER BY group_id"
)
_STORED = (
    f"SELECT group_id, oldest_version, newest_version, coalesce(train_version, {NO_VERSION}) AS"
    " planned FROM groups INDEXED BY {index} WHERE {where} ORDER BY group_id"
)
_READY = _STORED.format(index="groups_ready", where="state='ready' AND purpose='train'")
_LEASED = _STORED.format(index="groups_leased", where="state='leased'")
_TRAINED = _STORED.format(index="groups_by_batch", where="state='trained' AND train_version>=?")
_SET_ASIDE = (
    "SELECT train_version, count(*) FROM groups INDEXED BY groups_by_batch WHERE train_version>=?"
    " AND state='dropped' AND reason='untrainable' GROUP BY train_version"
)
LEFT = (
    "SELECT position, json_group_array(prompt_index) AS 'left [stored_json]' FROM left_prompts"
    " GROUP BY position ORDER BY position"
)
CHOSEN = "SELECT position, prompt_index FROM chosen_prompts"
_REWARDS = (
    "SELECT position, rewards AS \"rewards [stored_json]\" FROM groups WHERE purpose='train' AND"
    " rewards IS NOT NULL ORDER BY group_id"
)
# From the report: the groups of an old evaluation have no rows any more.
_SCORES = (
    "SELECT version, score FROM (SELECT version, json_extract(figures, '$.\"eval/pass_at_1\"') AS"
    " score FROM evaluations) WHERE score IS NOT NULL"
)
_NEWEST_OF_PROMPT = (
    f"SELECT {PAYLOAD} JOIN groups USING (group_id) WHERE prompt_id=? AND purpose=? ORDER BY"
    " group_id DESC LIMIT 1"
)
_ACTIVE = (
    f"SELECT group_id FROM {_OPEN_ROWS} UNION ALL SELECT group_id FROM ({_READY}) UNION ALL SELECT"
    f" group_id FROM ({_LEASED})"
)
# Only groups that may still be trained: to compare all rows of a long run takes seconds.
_DAMAGED_ROWS = (
    f"SELECT group_id FROM (SELECT * FROM groups NOT INDEXED WHERE group_id IN ({_ACTIVE}) EXCEPT"
    f" SELECT * FROM groups INDEXED BY groups_copy WHERE group_id IN ({_ACTIVE}))"
)
_DAMAGED = (
    f"SELECT group_id FROM blobs WHERE group_id IN ({_ACTIVE}) AND checksum(payload, group_id) IS"
    " NOT checksum"
)


# The names are of this project: converters are shared by all users of sqlite3 in a process.
sqlite3.register_converter("stored_json", msgspec.json.decode)
sqlite3.register_converter("stored_group", read_group)


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection in autocommit mode, for one thread at a time. Raises InfrastructureError if
    the file cannot be opened.
    """
    try:
        connection = sqlite3.connect(
            path,
            check_same_thread=False,
            isolation_level=None,
            detect_types=sqlite3.PARSE_COLNAMES,
        )
        connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
        # normal, not full: after a power loss the learner resumes from its newest checkpoint, and
        # the store is synced before a checkpoint is complete, so later commits would not be used.
        connection.execute("PRAGMA synchronous=normal")
        connection.create_function("checksum", -1, checksum, deterministic=True)
    except DAMAGE as error:
        raise InfrastructureError(f"{path} is not a usable store: {error}") from error
    return connection


def hold_lock(path: Path) -> IO[str]:
    """Lock `<path>.lock` until it is closed or the process exits. Raises Unavailable if another
    process has the lock.
    """
    lock = path.with_name(path.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise Unavailable(
            f"{path} is written by another process; end that process first"
        ) from error
    return lock


def stored_group(connection: sqlite3.Connection, group_id: int) -> PackedGroup | None:
    """Return the trajectories of a group, None if they are not stored. Raises InfrastructureError
    if they are damaged.
    """
    row = connection.execute(f"SELECT {PAYLOAD} WHERE group_id=?", (group_id,)).fetchone()
    return None if row is None else intact(group_id, row[0])


def intact(group_id: int, group: PackedGroup | None) -> PackedGroup:
    """Return a group as it was read by PAYLOAD. Raises InfrastructureError if it is damaged."""
    if group is None:
        raise InfrastructureError(
            f"the stored trajectories of group {group_id} are damaged (their checksum differs); if"
            f" the run cannot resume, drop the group with async-rl ledger RUN --drop {group_id}"
        )
    return group


def readers_of(path: Path) -> list[int]:
    """Return the pids of other processes of this machine that read the store in a transaction."""
    shared = path.with_name(path.name + "-shm")
    try:
        inode = shared.stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # As in "1: POSIX  ADVISORY  READ 4711 00:2a:98765 123 123": kind, pid and the file's inode.
    held = [lock.split() for lock in locks if f":{inode} " in lock]
    pids = {int(fields[4]) for fields in held if fields[3] == "READ"}
    return sorted(pids - {os.getpid()})


def select(
    connection: sqlite3.Connection, kind: type[T], query: str, values: Values = ()
) -> list[T]:
    """Return the rows of a query as objects of `kind`, whose fields are the columns."""
    cursor = connection.execute(query, values)
    names = [name for name, *_ in cursor.description]
    # Not strict: SQLite has 0 and 1 instead of booleans.
    return [
        msgspec.convert(dict(zip(names, row, strict=True)), kind, strict=False) for row in cursor
    ]


def snapshot(path: Path, target: Path) -> None:
    """Copy one moment of the store, also while it is written. Raises InfrastructureError if that
    fails.
    """
    target.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(connect(path)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
    except sqlite3.Error as error:
        raise InfrastructureError(
            f"{path} cannot be copied to {target}: {error}; free disk space or grant write"
            " permission"
        ) from error


class StoreReader:
    """A connection that reads, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.connection = connect(path)
        # Reads run on worker threads, and a connection serves one thread at a time.
        self._reading = threading.Lock()

    def close(self) -> None:
        """Close the connection."""
        with self._reading:  # a read that outlives its caller still uses the connection
            self.connection.close()

    def recover(self, steps_reused: int = 0) -> Recovered:
        """The state that the file contains. Call it before anything is written. Raises
        InfrastructureError if a group that may still be trained is damaged.

        steps_reused: the number of newest steps whose groups the next step trains again.
        """
        for (group_id,) in self._rows(_DAMAGED_ROWS):
            raise InfrastructureError(
                f"{self._path}: the row of group {group_id} is damaged; resume the run from its"
                " mirror (checkpoint.mirror), or start a new one"
            )
        for (group_id,) in self._rows(_DAMAGED):
            intact(group_id, None)
        learner_version = self.number(LEARNER_VERSION)
        return Recovered(
            learner_version=learner_version,
            lives=self._rows("SELECT incarnation, life, version FROM lives"),
            set_aside=dict(self._rows(_SET_ASIDE, learner_version)),
            newest_version=self.number("SELECT coalesce(max(version), 0) FROM steps"),
            next_group_id=self.number(_NEXT_GROUP),
            next_index=self.number(NEXT_INDEX),
            open=self._objects(OpenGroup, _OPEN),
            prompt_ids=dict(self._rows(f"SELECT group_id, prompt_id FROM {_OPEN_ROWS}")),
            ready=self._objects(StoredGroup, _READY),
            leased=self._objects(StoredGroup, _LEASED),
            trained=self._objects(StoredGroup, _TRAINED, learner_version - steps_reused),
            evaluations=dict(self._rows("SELECT version, finished_s IS NOT NULL FROM evaluations")),
            left=self._rows(LEFT),
            chosen=self._rows(CHOSEN),
            rewards=self._rewards(),
        )

    async def trained_after(self, version: int) -> list[StoredGroup]:
        """Groups trained by steps after `version`, planned for the version they were trained on."""
        return await asyncio.to_thread(self._objects, StoredGroup, _TRAINED, version)

    async def groups(self, group_ids: Sequence[int]) -> list[PackedGroup]:
        """The trajectories of these groups, in this order. Raises InfrastructureError if some are
        not stored.
        """
        return await asyncio.to_thread(self._groups, group_ids)

    async def newest_of_prompt(self, prompt_id: str, purpose: Purpose) -> PackedGroup | None:
        """The newest complete group of a prompt; None if no trajectories are stored, or damaged."""
        rows = await asyncio.to_thread(self._rows, _NEWEST_OF_PROMPT, prompt_id, purpose)
        return rows[0][0] if rows else None

    async def evaluation_groups(self, version: int) -> list[tuple[int, bool]]:
        """(group id, is complete) of each group of an evaluation, in the order of its prompts."""
        return await asyncio.to_thread(
            self._rows,
            "SELECT group_id, state='ready' FROM groups WHERE evaluation=? ORDER BY position",
            version,
        )

    async def evaluation_figures(self, version: int) -> dict[str, float] | None:
        """The reported metrics of an evaluation; None if it was not reported."""
        rows = await asyncio.to_thread(
            self._rows,
            'SELECT figures AS "figures [stored_json]" FROM evaluations WHERE version=?',
            version,
        )
        return rows[0][0] if rows else None

    async def evaluation_scores(self) -> dict[int, float]:
        """Mean pass rate of each finished evaluation, by version."""
        return dict(await asyncio.to_thread(self._rows, _SCORES))

    def _groups(self, group_ids: Sequence[int]) -> list[PackedGroup]:
        groups = []
        for group_id in group_ids:
            with self._reading:
                group = stored_group(self.connection, group_id)
            if group is None:
                raise InfrastructureError(
                    f"{self._path} no longer contains the trajectories of group {group_id}"
                )
            groups.append(group)
        return groups

    def _objects(self, kind: type[T], query: str, *parameters: int) -> list[T]:
        with self._reading:
            return select(self.connection, kind, query, parameters)

    def _rewards(self) -> Iterator[tuple[int, list[float]]]:
        # A generator: most runs never read them, and a long run has millions.
        yield from self._rows(_REWARDS)

    def _rows(self, query: str, *parameters: int | str) -> list[tuple[Any, ...]]:
        with self._reading:
            return self.connection.execute(query, parameters).fetchall()

    def number(self, query: str) -> int:
        """The one value that a query returns."""
        return int(self._rows(query)[0][0])
