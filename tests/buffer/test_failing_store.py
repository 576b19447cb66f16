"""A store that cannot be written: clear errors, nothing lost, and nobody is told what is not
stored.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from buffer_support import commit, make_group, opened, put, settle, states, take, tickets, within
from test_store import open_store, write

from async_rl.core.errors import InfrastructureError
from async_rl.core.heads import pack_group
from async_rl.protocol.buffer import PutGroup
from async_rl.protocol.learner import CommitStep, TakeBatch


async def test_a_store_that_another_program_holds_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.buffer.store.connection.BUSY_MS", 50)

    async with open_store(tmp_path) as store:
        write(store, 0)
        await store.flush()
        holder = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        write(store, 1)
        with pytest.raises(
            InfrastructureError,
            match=r"cannot be written: database is locked; end the program that holds it",
        ):
            await store.flush()
    with pytest.raises(InfrastructureError, match="end the program that holds it"):
        open_store(tmp_path)
    holder.close()
    async with open_store(tmp_path) as store:
        assert [g.group_id for g in store.reader.recover().ready] == [0]


async def test_a_request_is_not_answered_by_a_store_that_failed_but_by_the_next_life(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, groups_per_step=2) as service:
        given = await tickets(service, 0, credit=3)
        for ticket in given[:2]:
            await put(service, ticket)
        await take(service, 0)
        failed = asyncio.create_task(service.store.failed())
        service.store.connection.execute("PRAGMA query_only=1")
        unanswered = [
            asyncio.create_task(request)
            for request in (
                service.put_group(PutGroup(payload=pack_group(make_group(given[2])))),
                service.commit_step(CommitStep(version=1, group_ids=[0, 1])),
                service.take_batch(TakeBatch(train_version=1, wait_s=0)),
            )
        ]
        with pytest.raises(InfrastructureError, match="cannot be written"):
            await within(failed)
        await settle()
        assert [task.done() for task in unanswered] == [False] * 3
        for task in unanswered:
            task.cancel()
    async with opened(tmp_path, groups_per_step=2) as service:
        await put(service, given[2])
        await commit(service, 1, [0, 1])
        assert list(states(tmp_path).values()).count("trained") == 2
        assert list(service.state.replay.ready) == [2]
