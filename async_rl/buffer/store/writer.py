"""Commits queued SQL in groups on a thread, so that the asyncio loop never waits for the disk.

SQLite writes a change to its log first and moves it into the file later (a checkpoint, which waits
twice for the disk). A second thread does that during the next commits. The writer does it itself
only if the log grows nevertheless.

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
from async_rl.buffer.store.connection import BUSY_MS, connect, hold_lock, readers_of
from async_rl.buffer.store.schema import SCHEMA_VERSION, Row, apply, create_schema, create_triggers
from async_rl.core.errors import InfrastructureError
from async_rl.core.os import sync

_log = logging.getLogger(__name__)


Flushes = list[asyncio.Future[None]]
_Changes = tuple[list[Change], float]
_Statements = tuple[Iterable[str], Mapping[str, Any]]
_Item = _Changes | _Statements | Flushes | None

# Trajectories of one transaction: more would delay the reply to a put behind many others.
_TRANSACTION_BYTES = 16 * 2**20
PAGE_BYTES = 16384  # fewer overflow pages per trajectory than with 4 KB
MOVE_BYTES = 4 * 2**20  # bytes in the log after which it is moved into the file
_COMMIT_BYTES = 4 * PAGE_BYTES  # bytes of a commit in the log besides trajectories, roughly
LONGEST_LOG_PAGES = 64 * 2**20 // PAGE_BYTES


class Writer:
    """The one writing connection with its queue and its threads: an async context manager.

    Creates the tables in a new file. Raises Unavailable if another process writes the file,
    InfrastructureError if it has another schema or is not a store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # Daemons: a process with a failed event loop must exit, even if the disk hangs.
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self._failed: Future[None] = Future()
        self._together: Flushes = []
        self._mover = threading.Thread(target=self._move, name="store checkpoint", daemon=True)
        self._is_due = threading.Event()
        self._is_over = False
        self._unmoved_bytes = 0
        self.is_log_long = False
        self._reported_pages = 2 * LONGEST_LOG_PAGES
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

    def end_after_commit(self, flushes: Flushes) -> None:
        """End these futures once all that was put is committed, with InfrastructureError if it
        cannot be.
        """
        self._queue.put(flushes)
        if self._failed.done():  # no thread takes from the queue any more
            finish(flushes, self._failed.exception())

    async def flush(self) -> None:
        """Wait for the commit of all that was put. Raises InfrastructureError if it failed."""
        commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.end_after_commit([commit])
        await commit

    async def flush_together(self, prepare: Callable[[], None]) -> None:
        """As flush, after one call of `prepare` for all callers that arrive together."""
        commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._together.append(commit)
        if len(self._together) == 1:
            try:
                # A round for each caller takes 1.3 times as long.
                await asyncio.sleep(0)
            finally:
                prepare()
                together = self._together
                self._together = []
                self.end_after_commit(together)
        await commit

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
        self._mover.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit the queue, stop the threads and close the file."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        # After the writer, whose last commit may still make a checkpoint due.
        self._is_over = True
        self._is_due.set()
        await asyncio.to_thread(self._mover.join)
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
            except (sqlite3.Error, OSError) as error:
                with contextlib.suppress(sqlite3.Error):
                    self.connection.execute("ROLLBACK")
                self._fail(_unwritable(self._path, error), flushes)
                return
            self._finish(flushes)

    def _transact(self, flushes: Flushes) -> bool:
        """Commit the present queue in one transaction. Return whether the end was reached."""
        size = 0
        rows: list[Row] = []
        item = self._queue.get()
        self.connection.execute("BEGIN IMMEDIATE")
        while True:
            match item:
                case list():
                    flushes += item
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
        if self.is_log_long:
            self._restart_log()
        elif self._unmoved_bytes >= MOVE_BYTES:
            self._unmoved_bytes = 0
            self._is_due.set()
        return item is None

    def _restart_log(self) -> None:
        """Let the next commit begin the log anew, unless somebody still reads it."""
        execute = self.connection.execute
        # Without waiting: a person may hold a read transaction for hours, and all commits would
        # wait with it.
        execute("PRAGMA busy_timeout=0")
        is_busy, num_pages, _ = execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        execute(f"PRAGMA busy_timeout={BUSY_MS}")
        # Also if the other thread is in a checkpoint: the next commit tries again.
        self.is_log_long = bool(is_busy)
        if is_busy and num_pages > self._reported_pages:
            # At twice the size each time, so that hours of a reader are a few lines.
            self._reported_pages = 2 * num_pages
            _log.warning(
                "the log of %s has %d MB and cannot be moved into the file while another program"
                " reads the file in one transaction%s; end the transaction",
                self._path,
                num_pages * PAGE_BYTES // 2**20,
                "".join(f" (pid {pid})" for pid in readers_of(self._path)),
            )

    def _move(self) -> None:
        """waits for: a checkpoint that is due · returns: a shorter log · stops: once the writer is
        over. Errors of the file are left to the writer, which meets them too.
        """
        with (
            contextlib.suppress(sqlite3.Error, InfrastructureError),
            contextlib.closing(connect(self._path)) as connection,
        ):
            while True:
                self._is_due.wait()
                # Before the look at the end, which is a separate notice.
                self._is_due.clear()
                if self._is_over:
                    return
                _, num_pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                # Although all of it was moved: SQLite restarts the log only if it finds no newer
                # commit in it, and a writer that never rests always has one.
                self.is_log_long = num_pages > LONGEST_LOG_PAGES

    def _fail(self, error: InfrastructureError, flushes: Flushes) -> None:
        self._failed.set_exception(error)
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, list):
                flushes += item
        self._finish(flushes, error)

    def _finish(self, flushes: Flushes, error: Exception | None = None) -> None:
        # Once for all: waking the loop costs as much as a small change.
        if flushes:
            flushes[0].get_loop().call_soon_threadsafe(finish, flushes, error)


def finish(flushes: Flushes, error: BaseException | None = None) -> None:
    """End these flushes; call it in their event loop."""
    for commit in flushes:
        if commit.done():  # its caller was cancelled
            continue
        if error is None:
            commit.set_result(None)
        else:
            commit.set_exception(error)


def _unwritable(path: Path, error: sqlite3.Error | OSError) -> InfrastructureError:
    remedy = "free disk space, grant write permission or repair it"
    if isinstance(error, sqlite3.OperationalError):
        code = error.sqlite_errorcode & 0xFF  # without the extended code
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            remedy = "end the program that holds it open for writing"
    return InfrastructureError(f"{path} cannot be written: {error}; {remedy}, then resume the run")
