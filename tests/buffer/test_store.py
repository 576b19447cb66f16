"""One store with its writer: what a flush promises, and what a file that cannot be written does."""

import asyncio
import contextlib
import hashlib
import logging
import os
import sqlite3
import sys
import threading
from pathlib import Path

import pytest
from buffer_support import Clock, make_group, opened

from async_rl.buffer import changes
from async_rl.buffer.service import BufferService
from async_rl.buffer.store import writer
from async_rl.buffer.store.schema import SCHEMA_VERSION, expected_schema
from async_rl.buffer.store.store import Store
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.heads import pack_group, read_group
from async_rl.core.types import Group, Purpose


def open_store(path: Path) -> Store:
    return Store(path, clock=Clock())


def writing(path: Path) -> contextlib.AbstractAsyncContextManager[BufferService]:
    """A buffer that any number of groups may be put into."""
    return opened(path, groups_per_step=2000)


def admitted(service: BufferService) -> Group:
    """Return the result of a group that was handed out."""
    ticket = service.state.hand_out(
        Purpose.TRAIN, generator="generator-0", incarnation="a", version=0, now_s=0.0
    )
    assert ticket is not None
    return make_group(ticket)


def write(service: BufferService, group: Group | None = None, payload: bytes = b"") -> Group:
    """Queue the changes by which a group is complete."""
    group = group or admitted(service)
    packed = pack_group(group)
    service.state.complete(read_group(packed), memoryview(payload or packed), 0.0)
    service.store.write(service.state.drain_changes())
    return group


def committed(store: Store) -> list[int]:
    return [group.group_id for group in store.reader.recover().ready]


async def test_what_was_flushed_is_read_back_equal_and_no_dropped_group(tmp_path: Path) -> None:
    async with writing(tmp_path) as service:
        store = service.store
        written = [write(service) for _ in range(3)]
        store.write([changes.Dropped(group_id=0, reason="untrainable", message="")])
        await store.flush()
        for before, packed in zip(written[1:], await store.reader.groups([1, 2]), strict=True):
            assert pack_group(packed.unpacked()) == pack_group(before)
        assert [group.group_id for group in await store.groups([1])] == [1]
        with pytest.raises(InfrastructureError):
            await store.groups([0])


async def test_a_change_that_fails_leaves_no_part_of_itself(tmp_path: Path) -> None:
    async with writing(tmp_path) as service:
        group = admitted(service)
        with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as other:
            # The trajectories can be stored, and then the change of state cannot.
            other.execute("DROP TABLE transitions")
            write(service, group)
            with pytest.raises(InfrastructureError, match="transitions"):
                await service.store.flush()
            assert other.execute("SELECT count(*) FROM blobs").fetchone() == (0,)
            other.execute("PRAGMA busy_timeout=0")
            other.execute("BEGIN IMMEDIATE")  # nothing holds the file any more


async def test_others_read_while_it_writes_and_a_second_writer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.buffer.store.connection.BUSY_MS", 50)
    path = tmp_path / "store.sqlite"
    async with writing(tmp_path) as service:
        write(service)
        await service.store.flush()
        with pytest.raises(Unavailable, match="written by another process"):
            open_store(tmp_path)
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with contextlib.closing(sqlite3.connect(path, timeout=0)) as reader:
            found = reader.execute("SELECT state, reward_mean, pass_rate FROM groups").fetchall()
            assert found == [("ready", 1.0, 1.0)]
        write(service)
        locked = r"cannot be written: database is locked; end the program that holds it"
        with pytest.raises(InfrastructureError, match=locked):
            await service.store.flush()
    with pytest.raises(InfrastructureError, match="end the program that holds it"):
        open_store(tmp_path)
    holder.close()
    async with open_store(tmp_path) as store:
        assert committed(store) == [0]


def test_a_file_that_is_no_store_or_has_another_schema_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(InfrastructureError, match="schema 99"):
        open_store(tmp_path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(InfrastructureError, match=r"store\.sqlite"):
        open_store(tmp_path)


def test_a_store_of_this_version_has_exactly_these_tables() -> None:
    """The audit compares the SQL with that of an older run's store, its comments included."""
    found = hashlib.sha256(repr(expected_schema()).encode()).hexdigest()[:16]
    assert (SCHEMA_VERSION, found) == (17, "386424fcdcf8f674")


async def test_a_failed_write_ends_the_store_and_keeps_what_was_committed(tmp_path: Path) -> None:
    async with writing(tmp_path) as service:
        store = service.store
        write(service)
        await store.flush()
        failed = asyncio.create_task(store.failed())
        store.connection.execute("PRAGMA max_page_count=1")
        for _ in range(1, 500):
            write(service)
        for wait in (store.flush(), store.flush(), failed):
            with pytest.raises(InfrastructureError, match="full"):
                await wait
    async with open_store(tmp_path) as store:
        ready = committed(store)
        assert ready == list(range(len(ready)))
        assert 1 <= len(ready) < 500


async def test_the_connection_has_the_settings_on_which_the_promises_rest(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with open_store(tmp_path) as store:
        for name, value in {
            "synchronous": 1,  # the log, before it is moved into the file
            "journal_mode": "wal",
            "wal_autocheckpoint": 0,
            "page_size": 16384,
            "temp_store": 2,  # triggers are in memory, whatever is full
        }.items():
            assert store.connection.execute(f"PRAGMA {name}").fetchone() == (value,), name
        # A process whose event loop has failed exits although its disk hangs.
        added = set(threading.enumerate()) - before
        assert [t.daemon for t in added if t.name.startswith("store ")] == [True, True]


async def test_the_log_stays_short_although_the_writer_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast run on a slow disk had a log of 2 GB after 6,000 steps; its index is in memory."""
    limit_bytes = 2**22
    monkeypatch.setattr(writer, "MOVE_BYTES", limit_bytes // 4)
    monkeypatch.setattr(writer, "LONGEST_LOG_PAGES", limit_bytes // 16384)
    log = tmp_path / "store.sqlite-wal"
    longest = 0

    async with writing(tmp_path) as service:
        for number in range(800):
            # As large as a group of some samples, which compression would not leave.
            write(service, payload=os.urandom(65_000))
            # Two commits are always under way, so that no checkpoint finds the writer idle.
            if number % 2:
                await service.store.flush()
            longest = max(longest, log.stat().st_size)
    # What is written during two checkpoints comes on top; without a limit it would be 100 MB.
    assert limit_bytes < longest < 10 * limit_bytes


async def test_a_reader_that_holds_a_transaction_delays_no_commit_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "MOVE_BYTES", 2**20)
    monkeypatch.setattr(writer, "LONGEST_LOG_PAGES", 2**21 // 16384)
    # A commit that waited for the reader would never return.
    monkeypatch.setattr(writer, "BUSY_MS", 10**9)
    hold = (
        "import sqlite3, sys; store = sqlite3.connect(sys.argv[1]); store.execute('BEGIN');"
        " store.execute('SELECT count(*) FROM groups').fetchall(); print(flush=True);"
        " sys.stdin.read()"
    )

    async def write_next() -> None:
        write(service)
        await store.flush()

    with caplog.at_level(logging.WARNING):
        async with writing(tmp_path) as service, asyncio.timeout(60):
            store = service.store
            await write_next()
            reader = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                hold,
                tmp_path / "store.sqlite",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert reader.stdout is not None
            await reader.stdout.readline()
            # On a busy machine the thread that looks at the log gets its turn late.
            while len(caplog.records) < 2:
                await write_next()
            first_mb, second_mb = [record.args[1] for record in caplog.records]  # type: ignore
            assert 2 * first_mb <= second_mb < 3 * first_mb, "again at twice the size"
            await reader.communicate(b"")
            assert f"(pid {reader.pid}); end the transaction" in caplog.text
            while store.is_log_long:
                await write_next()
            # The next commit waits again for a person who writes.
            assert store.connection.execute("PRAGMA busy_timeout").fetchone() == (10**9,)
