"""Connections to a run's store, and its values as objects.

A column `name [stored_json]` of a query is decoded JSON, and `name [stored_group]` a PackedGroup.
The function `checksum` of SQL is the one of core/checksums.py.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from async_rl.core.checksums import checksum
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.heads import PackedGroup, read_group

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
