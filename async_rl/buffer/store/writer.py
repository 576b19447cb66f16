"""Commits queued SQL in groups on a thread, so that the asyncio loop never waits for the disk.

SQLite writes a change to its log first and moves it into the file later (a checkpoint, which waits
twice for the disk). The writer does that after it has answered for some MB of commits.

Invariants
- `flush()` returns after the commit of all that was put before it; one transaction takes whatever
  is queued (group commit).
- The statements of one `put` are in one transaction.
- A failed write is final: it and every later flush raise, `failed()` raises, and the file keeps
  all earlier commits.
"""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from async_rl.buffer.changes import Change, Completed
from async_rl.buffer.store.connection import connect, hold_lock
from async_rl.buffer.store.schema import SCHEMA_VERSION, Row, apply, create_schema, create_triggers
from async_rl.core.errors import InfrastructureError
from async_rl.core.os import sync

_log = logging.getLogger(__name__)


Flushes = list[Future[None]]
_Changes = tuple[list[Change], float]
_Statements = tuple[Iterable[str], Mapping[str, Any]]
_Item = _Changes | _Statements | Future[None] | None

# Trajectories of one transaction: more would delay the reply to a put behind many others.
_TRANSACTION_BYTES = 16 * 2**20
PAGE_BYTES = 16384  # fewer overflow pages per trajectory than with 4 KB
MOVE_BYTES = 16 * 2**20  # bytes in the log after which it is moved into the file
_COMMIT_BYTES = 4 * PAGE_BYTES  # bytes of a commit in the log besides trajectories, roughly
LONG_LOG_PAGES = 128 * 2**20 // PAGE_BYTES  # only a reader can make it this long


class Writer:
    """The one writing connection with its queue and its thread: an async context manager.

    Creates the tables in a new file. Raises Unavailable if another process writes the file,
    InfrastructureError if it has another schema or is not a store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # A daemon: a process with a failed event loop must exit, even if the disk hangs.
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self._failed: Future[None] = Future()
        self._round: asyncio.Task[None] | None = None
        self._unmoved_bytes = 0
        self._reported_pages = LONG_LOG_PAGES
        with contextlib.ExitStack() as stack:
            # First: a second process must not even create tables or recover the log.
            stack.enter_context(hold_lock(path))
            self.connection = stack.enter_context(contextlib.closing(connect(path)))
            try:
                self._create_tables()
                create_triggers(self.connection)
            except sqlite3.Error as error:
                raise _unwritable(path, error) from error
            self._files = stack.pop_all()

    def _create_tables(self) -> None:
        execute = self.connection.execute
        execute(f"PRAGMA page_size={PAGE_BYTES}")
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA wal_autocheckpoint=0")
        version = execute("PRAGMA user_version").fetchone()[0]
        set_version = f"PRAGMA user_version={SCHEMA_VERSION};"
        if version == 0:
            self.connection.executescript(f"BEGIN; {create_schema()} {set_version} COMMIT;")
        elif version != SCHEMA_VERSION:
            raise InfrastructureError(
                f"{self._path} has store schema {version}, this version writes {SCHEMA_VERSION};"
                " resume the run with the version that started it"
            )
        # Fails now, not in the middle of the run, if the file cannot be written.
        self.connection.executescript(f"BEGIN IMMEDIATE; {set_version} ROLLBACK;")

    def put(self, statements: Iterable[str], parameters: Mapping[str, Any]) -> None:
        """Queue statements and the values of their names, as one change."""
        self._queue.put((statements, parameters))

    def put_changes(self, changes: list[Change], now_s: float) -> None:
        """Queue changes in their order. now_s: Unix time."""
        self._queue.put((changes, now_s))

    async def flush(self) -> None:
        """Wait for the commit of all that was put. Raises InfrastructureError if it failed."""
        commit: Future[None] = Future()
        self._queue.put(commit)
        if self._failed.done():  # no thread takes from the queue any more
            await self.failed()
        await asyncio.wrap_future(commit)

    async def flush_together(self, prepare: Callable[[], None]) -> None:
        """As flush, after one call of `prepare` for all callers that arrive together."""
        # A round for each caller takes 1.3 times as long.
        if self._round is None:
            self._round = asyncio.create_task(self._flush_round(prepare), name="flush")
        # A caller that is cancelled must not cancel the round of the others.
        await asyncio.shield(self._round)

    async def _flush_round(self, prepare: Callable[[], None]) -> None:
        self._round = None
        prepare()
        await self.flush()

    async def secure(self) -> None:
        """Return once all that was put is on the disk. Raises InfrastructureError if it could not
        be written.
        """
        await self.flush()
        # In a thread: a sync of a busy disk takes seconds, and requests for work must not wait.
        await asyncio.to_thread(self._sync_files)

    def _sync_files(self) -> None:
        # With synchronous=normal SQLite syncs the log only before it moves it into the file. SQLite
        # syncs the file, which must not be opened here: closing it would release SQLite's locks,
        # and the next reader that closes would delete the log.
        log = self._path.with_name(self._path.name + "-wal")
        try:
            for path in (log, self._path.parent):
                sync(path)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    async def failed(self) -> None:
        """Wait until a write fails, and raise its error."""
        await asyncio.shield(asyncio.wrap_future(self._failed))

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit the queue, stop the thread and close the file."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._files.close()

    def _run(self) -> None:
        """takes: queued changes · waits for: the queue · returns: commits · stops: at None or at
        the first failure.
        """
        is_last = False
        while not is_last:
            flushes: Flushes = []
            try:
                is_last = self._transact(flushes)
                while flushes:
                    flushes.pop().set_result(None)
                if self._unmoved_bytes >= MOVE_BYTES:
                    self._move()
            except (sqlite3.Error, OSError) as error:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                self._fail(_unwritable(self._path, error), flushes)
                return

    def _transact(self, flushes: Flushes) -> bool:
        """Commit the present queue in one transaction. Return whether the end was reached."""
        size = 0
        rows: list[Row] = []
        item = self._queue.get()
        self.connection.execute("BEGIN IMMEDIATE")
        while True:
            match item:
                case Future():
                    if item.set_running_or_notify_cancel():
                        flushes.append(item)
                case (list(made), float(now_s)):
                    rows += [(change, now_s) for change in made]
                    size += sum([len(c.payload) for c in made if isinstance(c, Completed)])
                case (statements, parameters):
                    apply(self.connection, rows)
                    rows.clear()
                    for sql in statements:
                        self.connection.execute(sql, parameters)
            # Until the queue is empty: one sync of the disk then covers the puts of all generators.
            if item is None or size > _TRANSACTION_BYTES or self._queue.empty():
                break
            item = self._queue.get()
        apply(self.connection, rows)
        self.connection.execute("COMMIT")
        self._unmoved_bytes += size + _COMMIT_BYTES
        return item is None

    def _move(self) -> None:
        """Move the log into the file; the next commit begins it anew, unless a process reads it."""
        self._unmoved_bytes = 0
        # Passive: a person may hold a read transaction for hours, and all commits would wait too.
        _, num_pages, _ = self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if num_pages > self._reported_pages:
            # At twice the size each time, so that hours of a reader are a few lines.
            self._reported_pages = 2 * num_pages
            _log.warning(
                "the log of %s has %d MB and cannot be moved into the file while another program"
                " reads the file in one transaction (fuser names it); end the transaction",
                self._path,
                num_pages * PAGE_BYTES // 2**20,
            )

    def _fail(self, error: InfrastructureError, flushes: Flushes) -> None:
        self._failed.set_exception(error)
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, Future) and item.set_running_or_notify_cancel():
                flushes.append(item)
        for commit in flushes:
            commit.set_exception(error)


def _unwritable(path: Path, error: sqlite3.Error | OSError) -> InfrastructureError:
    remedy = "free disk space, grant write permission or repair it"
    if isinstance(error, sqlite3.OperationalError):
        code = error.sqlite_errorcode & 0xFF  # without the extended code
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            remedy = "end the program that holds it open for writing"
    return InfrastructureError(f"{path} cannot be written: {error}; {remedy}, then resume the run")
