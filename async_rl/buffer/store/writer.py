"""Commits queued SQL in groups, on a thread of its own, so that the asyncio loop never waits for
the disk.

SQLite writes a change to its log first and moves it into the file later (a checkpoint, with two
waits for the disk). That is done by a second thread beside the next commits; only if the log grows
in spite of it, the writer does it itself.

Invariants
- `flush()` returns after the commit of all that was put before it; one transaction takes whatever
  is queued (group commit).
- The statements of one `put` are in one transaction.
- A failed write is final: it and every later flush raise, `failed()` wakes, and the file keeps what
  was committed before.
Used by store.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import queue
import sqlite3
import threading
from pathlib import Path
from typing import IO, Any, Literal

from async_rl.core import codec
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.types import Group

Statement = tuple[str, tuple[Any, ...] | Group]
"""SQL with its parameters; a Group stands for (group_id, the group encoded), so that encoding
happens on the writer's thread.
"""

_Item = list[Statement] | asyncio.Future[None] | None

_TRANSACTION_BYTES = (
    16 * 2**20
)  # trajectories of one transaction, so that a put behind many others still meets its latency
_PAGE_BYTES = 16384  # fewer overflow pages per trajectory than with 4 KB
_MOVE_BYTES = 4 * 2**20  # of the log, after which it is moved into the file
_COMMIT_BYTES = 4 * _PAGE_BYTES  # what a commit writes to the log besides trajectories, roughly
_LONGEST_LOG_PAGES = 64 * 2**20 // _PAGE_BYTES
_BUSY_MS = 30_000  # people who read with plain SQL may hold the file for a while


def connect(path: Path, *, durability: Literal["normal", "full"] = "normal") -> sqlite3.Connection:
    """A connection in autocommit mode, usable from any one thread at a time. Raises
    InfrastructureError if the file cannot be opened.
    """
    try:
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    except sqlite3.Error as error:
        raise InfrastructureError(f"{path} cannot be opened as a store: {error}") from error
    try:
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        connection.execute(f"PRAGMA synchronous={durability}")
    except sqlite3.Error as error:
        connection.close()
        raise InfrastructureError(f"{path} is not a usable store: {error}") from error
    return connection


def snapshot(path: Path, target: Path) -> None:
    """Copies the store as it is at one moment, also while it is written. Raises InfrastructureError
    if it cannot.
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
            f"{path} cannot be copied to {target}: {error}; make room or give permission"
        ) from error


class Writer:
    """The one writing connection with its queue and thread."""

    def __init__(self, path: Path, *, durability: Literal["normal", "full"]) -> None:
        self._path = path
        self._connection = connect(path, durability=durability)
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: InfrastructureError | None = None
        self._failed = asyncio.Event()
        self._mover = threading.Thread(target=self._move, name="store checkpoint", daemon=True)
        self._is_due: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._unmoved_bytes = 0
        self._is_log_long = False

    def create(self, tables: str, schema_version: int) -> None:
        """Makes the tables in a new file. Raises InfrastructureError if the file is of another
        schema, or no store.
        """
        try:
            self._connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA wal_autocheckpoint=0")
            found = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                self._connection.executescript(
                    f"BEGIN; {tables} PRAGMA user_version={schema_version}; COMMIT;"
                )
            elif found != schema_version:
                raise InfrastructureError(
                    f"{self._path} has store schema {found}, needed is {schema_version}; resume it"
                    " with the version it began with"
                )
            self._connection.executescript(
                f"BEGIN IMMEDIATE; PRAGMA user_version={schema_version}; ROLLBACK;"
            )  # may it be written?
        except sqlite3.Error as error:
            raise _unwritable(self._path, error) from error

    def start(self) -> None:
        """Begins to write; called on the loop that will flush."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self._thread.start()
        self._mover.start()

    def put(self, *statements: Statement) -> None:
        """Queues one change."""
        self._queue.put(list(statements))

    async def flush(self) -> None:
        """Waits for the commit of all that was put. Raises InfrastructureError if it failed."""
        if self._error is not None:
            raise self._error
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(future)
        if self._error is not None:  # it may have failed before it saw this future
            raise self._error
        await future

    async def failed(self) -> None:
        """Raises what ended the writer, when it ends."""
        await self._failed.wait()
        raise self._error or InfrastructureError(f"{self._path} was closed")

    async def finish(self) -> None:
        """Commits what is queued and ends the thread."""
        self._queue.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._is_due.put(False)
            await asyncio.to_thread(self._mover.join)

    def close_file(self) -> None:
        """Closes the file; after `finish` if it was started."""
        self._connection.close()

    def _run(self) -> None:
        """Takes queued changes; waits for the queue; gives commits and resolved flushes; ends at
        None or at the first failure.
        """
        item = self._queue.get()
        while item is not None:
            flushes: list[asyncio.Future[None]] = []
            try:
                is_last = self._transact(item, flushes)
            except (sqlite3.Error, OSError) as error:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                self._fail(_unwritable(self._path, error), flushes)
                return
            self._tell(flushes, None)
            item = None if is_last else self._queue.get()

    def _transact(self, item: _Item, flushes: list[asyncio.Future[None]]) -> bool:
        """One transaction of what is queued now; whether the end was reached."""
        size = 0
        self._connection.execute("BEGIN IMMEDIATE")
        while True:
            if isinstance(item, list):
                size += self._apply(item)
            elif item is not None:
                flushes.append(item)
            if item is None or size > _TRANSACTION_BYTES or self._queue.empty():
                break
            item = self._queue.get()
        self._connection.execute("COMMIT")
        self._unmoved_bytes += size + _COMMIT_BYTES
        if self._is_log_long:
            self._is_log_long = False
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)")
        elif self._unmoved_bytes >= _MOVE_BYTES:
            self._unmoved_bytes = 0
            self._is_due.put(True)
        return item is None

    def _move(self) -> None:
        """Moves the log into the file whenever it is due; waits for the queue; ends at False. What
        fails here the writer meets itself.
        """
        with (
            contextlib.suppress(sqlite3.Error, InfrastructureError),
            contextlib.closing(connect(self._path)) as connection,
        ):
            while self._is_due.get():
                _, num_pages, num_moved = connection.execute(
                    "PRAGMA wal_checkpoint(PASSIVE)"
                ).fetchone()
                self._is_log_long = num_pages > _LONGEST_LOG_PAGES and num_moved < num_pages

    def _apply(self, statements: list[Statement]) -> int:
        """Executes one change; bytes of trajectories written."""
        size = 0
        for sql, parameters in statements:
            if isinstance(parameters, Group):
                payload = codec.encode(parameters)
                size += len(payload)
                parameters = (parameters.group_id, payload)
            self._connection.execute(sql, parameters)
        return size

    def _fail(self, error: InfrastructureError, flushes: list[asyncio.Future[None]]) -> None:
        self._error = error
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, asyncio.Future):
                flushes.append(item)
        self._tell(flushes, error)

    def _tell(self, flushes: list[asyncio.Future[None]], error: InfrastructureError | None) -> None:
        if self._loop is not None and (flushes or error):
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._resolve, flushes, error)

    def _resolve(
        self, flushes: list[asyncio.Future[None]], error: InfrastructureError | None
    ) -> None:
        for future in flushes:
            if not future.done():
                future.set_exception(error) if error else future.set_result(None)
        if error:
            self._failed.set()


def _unwritable(path: Path, error: sqlite3.Error | OSError) -> InfrastructureError:
    locked = isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )
    remedy = (
        "end the program that holds it open for writing"
        if locked
        else "make room, give permission or repair it"
    )
    return InfrastructureError(f"{path} cannot be written: {error}; {remedy}, then resume the run")


def hold_lock(path: Path) -> IO[str]:
    """Holds `<path>.lock` until closed or until the process dies."""
    lock = path.with_name(path.name + ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise Unavailable(f"{path} is written by another process; end that buffer first") from error
    return lock
