"""Groups that several steps use (buffer.uses_per_group), in the buffer's replies and its store."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from buffer_support import (
    commit,
    forget,
    make_config,
    opened,
    problems,
    put_all,
    step,
    sync,
    taken_ids,
)

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import batch_of, batch_rows, complete_steps
from async_rl.core.errors import ProtocolError
from async_rl.core.heads import PackedGroup
from async_rl.protocol.learner import DropBatch, GetHistory, History, ReadSequences, Sequences


async def sequences(service: BufferService, version: int) -> list[int]:
    """The groups of the sequences of a leased batch, as the learner reads them."""
    names = [(group_id, 0) for group_id in await taken_ids(service, version)]
    read = await service.read_sequences(ReadSequences(train_version=version, samples=names))
    assert isinstance(read, Sequences)
    assert len(read.trajectories) == len(names)
    return [group_id for group_id, _ in names]


async def read_and_commit(service: BufferService, version: int) -> list[int]:
    """Make groups and train a batch, whose sequences are read; return its groups."""
    await put_all(service, version)
    group_ids = await sequences(service, version)
    assert await taken_ids(service, version) == group_ids, "a repeated request"
    await commit(service, version + 1, group_ids)
    return group_ids


async def test_groups_are_used_again_after_restarts_and_by_a_learner_that_went_back(
    tmp_path: Path,
) -> None:
    config = make_config(uses=3, max_staleness=3)
    expected = {0: [0, 1], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4, 5], 3: [2, 3, 4, 5, 6, 7]}
    for version in range(3):
        async with opened(tmp_path, config) as service:
            assert await read_and_commit(service, version) == expected[version]
    assert problems(tmp_path, config) == []
    with reading(tmp_path) as store:
        assert [row.group_id for row in batch_rows(store, 3)] == expected[2]
        batch = batch_of(store, 3)
        assert batch is not None
        assert [group.group_id for group in batch] == expected[2]
    async with opened(tmp_path, config) as service:
        await sync(service, 1)
        for version in (1, 2, 3):
            assert await read_and_commit(service, version) == expected[version]
    assert problems(tmp_path, config) == []


async def test_the_uses_of_undone_steps_are_not_part_of_the_batches(tmp_path: Path) -> None:
    config = make_config(uses=2, max_staleness=2)
    async with opened(tmp_path, config) as service:
        for version in range(3):
            await step(service, version)
        await sync(service, 1)
        bad = await taken_ids(service, 1)
        await service.drop_batch(DropBatch(train_version=1, group_ids=bad, message="bad"))
        batches = [await step(service, version) for version in (1, 2)]
    assert problems(tmp_path, config) == []
    with reading(tmp_path) as store:
        for number, batch in enumerate(batches, 2):
            assert [row.group_id for row in batch_rows(store, number)] == batch


async def test_groups_that_a_start_would_use_again_are_not_forgotten(tmp_path: Path) -> None:
    config = make_config(uses=3, max_staleness=8)
    async with opened(tmp_path, config) as service:
        for version in range(6):
            await step(service, version)
        await forget(service, 4)
        assert await service.history(GetHistory()) == History(first=4, last=6)
        with pytest.raises(ProtocolError, match="restore that"):
            await sync(service, 3)
        await sync(service, 4)
        assert await sequences(service, 4) == [4, 5, 6, 7, 8, 9]
    with reading(tmp_path) as store:
        assert complete_steps(store) == []


async def test_a_group_that_was_used_too_late_is_found(tmp_path: Path) -> None:
    config = make_config(uses=2, max_staleness=2)
    async with opened(tmp_path, config) as service:
        for version in range(3):
            await step(service, version)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
        store.execute("INSERT INTO reused SELECT 0, step_id FROM steps WHERE version IN (1, 3)")
        store.execute("UPDATE groups SET oldest_version=-1 WHERE group_id=0")
        store.commit()
    again = "trained group 0 again, which is too old or was not trained before"
    found = problems(tmp_path, config)
    assert [each for each in found if "again" in each] == [f"step {n} {again}" for n in (1, 3)]


async def test_a_group_that_is_used_again_is_in_memory_until_its_step_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, make_config(uses=3, max_staleness=3)) as service:
        read: list[int] = []
        from_file = service.store.reader.groups

        async def groups(group_ids: Sequence[int]) -> list[PackedGroup]:
            read.extend(group_ids)
            return await from_file(group_ids)

        monkeypatch.setattr(service.store.reader, "groups", groups)
        for version in range(3):
            await read_and_commit(service, version)
        assert read == [0, 1, 0, 1, 2, 3]
