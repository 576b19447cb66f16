"""Single-bit flips in the file of a store: each is found by a resume, a read or the audit, or it
changes nothing that the store contains.
"""

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from buffer_support import (
    evaluate,
    fail,
    make_config,
    opened,
    problems,
    put,
    put_all,
    rows,
    sync,
    take,
    tickets,
    train,
)

from async_rl.buffer.store.connection import DAMAGE
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.reader import StoreReader
from async_rl.buffer.store.trajectories import rollouts
from async_rl.core.errors import InfrastructureError
from async_rl.launchers.commands.stored import drop_group

CONFIG = make_config(recording="full")
NUM_FLIPS = 120


async def make_store(run_dir: Path) -> Path:
    """A store with groups in every state, and an evaluation."""
    run_dir.mkdir()
    async with opened(run_dir, CONFIG) as service:
        await evaluate(service, 0)
        await put_all(service)
        for version in range(3):
            for ticket in await tickets(service, version):
                await put(service, ticket, versions=[version] * (3 + ticket.group_id))
            await train(service, version)
        await sync(service, 2, "learner")
        await train(service, 2)
        given = await tickets(service, 3)
        await put(service, given[0])
        await fail(service, given[1].group_id, 1)
        await take(service, 3)
    path = run_dir / "store.sqlite"
    rows(run_dir, "PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def content(path: Path) -> dict[str, list[Any]]:
    """All that the file contains: schema, version, and the rows of every table."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        schema = connection.execute(
            "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
        ).fetchall()
        tables = [name.decode() for kind, name, *_ in schema if kind == b"table"]
        version = connection.execute("PRAGMA user_version").fetchall()
        rows = {
            name: connection.execute(f"SELECT * FROM {name} NOT INDEXED").fetchall()
            for name in tables
        }
        return {"schema": schema, "version": version} | rows


def complaints(path: Path) -> Iterator[str]:
    """Yield what a resume, the readers and the audit say about the file."""
    try:
        with contextlib.closing(StoreReader(path)) as reader:
            recovered = reader.recover()
            reader._groups([group.group_id for group in (*recovered.ready, *recovered.leased)])
        with reading(path.parent) as store:
            rollouts(store, step=None, most=100)
    except (InfrastructureError, *DAMAGE) as error:
        yield str(error)
    try:
        yield from problems(path.parent, CONFIG)
    except InfrastructureError as error:
        yield str(error)


async def test_no_flip_of_a_bit_is_silent(tmp_path: Path) -> None:
    path = await make_store(tmp_path / "run")
    assert list(complaints(path)) == []
    intact = path.read_bytes()
    expected = content(path)
    damaged = tmp_path / "copy" / "store.sqlite"
    damaged.parent.mkdir()
    # Most of a small store is empty space in its pages.
    used = [at for at, byte in enumerate(intact) if byte]
    damaged.write_bytes(intact)
    assert list(complaints(damaged)) == []
    rng = random.Random(0)
    silent = []
    num_found = 0
    for _ in range(NUM_FLIPS):
        data = bytearray(intact)
        at, bit = rng.choice(used), rng.randrange(8)
        data[at] ^= 1 << bit
        for file in damaged.parent.iterdir():
            file.unlink()
        damaged.write_bytes(data)
        if list(complaints(damaged)):
            num_found += 1
        elif content(damaged) != expected:
            silent.append((at, bit))
    assert silent == []
    # The others are in deleted rows and in fields of the file's header that nothing reads.
    assert num_found > 0.8 * NUM_FLIPS


async def test_a_damaged_group_is_named_at_the_resume_and_can_be_dropped(tmp_path: Path) -> None:
    path = await make_store(tmp_path / "run")
    with contextlib.closing(StoreReader(path)) as reader:
        recovered = reader.recover()
    ready, *others = [group.group_id for group in (*recovered.ready, *recovered.leased)]
    ((payload,),) = rows(path.parent, "SELECT payload FROM blobs WHERE group_id=?", ready)
    payload = payload[:-1] + bytes([payload[-1] ^ 1])
    rows(path.parent, "UPDATE blobs SET payload=? WHERE group_id=?", payload, ready)
    with pytest.raises(InfrastructureError, match=f"group {ready} are damaged .* --drop {ready}"):
        async with opened(path.parent, CONFIG):
            pass
    assert problems(path.parent, CONFIG) == [
        f"the stored trajectories of group {ready} are damaged"
    ]
    await drop_group(path.parent, ready)
    async with opened(path.parent, CONFIG) as service:
        assert service.state.queue()["ready"] + service.state.queue()["leased"] == len(others)
    assert problems(path.parent, CONFIG) == []
