"""The buffer's replies to the learner: batches, commits, going back; and its memory of them after a
restart.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from buffer_support import (
    FakePrompts,
    commit,
    forget,
    opened,
    put,
    put_all,
    rows,
    settle,
    step,
    sync,
    take,
    taken_ids,
    tickets,
    within,
)

from async_rl.buffer.service import BufferService
from async_rl.core.errors import InfrastructureError, ProtocolError
from async_rl.protocol.learner import DropBatch, ReadSequences


async def test_a_take_is_parked_until_its_last_group_is_put(
    service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # New groups are in memory: a take waits for no read of the disk.
    monkeypatch.setattr(service.store.reader, "groups", None)
    missing = "0 of 2 groups are ready for step 1"
    assert await taken_ids(service, 0, wait_s=0.01) == []
    parked = asyncio.create_task(taken_ids(service, 0, wait_s=60))
    await settle()
    assert service.waits_for() == f"groups: {missing}; no generator requests work"
    given = await tickets(service, 0)
    await put(service, given[0])
    assert not parked.done()
    assert service.waits_for() == "groups: 1 of 2 groups are ready for step 1"
    await put(service, given[1])
    assert await parked == [0, 1]
    with pytest.raises(ProtocolError, match=r"groups \[2\] are not leased for version 0"):
        await service.read_sequences(ReadSequences(train_version=0, samples=[(2, 0)]))


async def test_dropping_over_age_groups_lets_fresh_ones_be_admitted(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        await step(service, 0)
        # Their tokens are older than the version of their generator.
        await put_all(service, 1, versions=[0, 1])
        parked = asyncio.create_task(tickets(service, 1, wait_s=60))
        await settle()
        learner = asyncio.create_task(taken_ids(service, 1, wait_s=60))
        fresh = await parked
        assert service.state.drops == {"over_age": 2}
        for ticket in fresh:
            await put(service, ticket)
        assert [t.group_id for t in fresh] == await learner == [4, 5]


async def test_open_groups_may_be_as_old_as_the_version_that_the_learner_went_back_to(
    tmp_path: Path,
) -> None:
    def open_versions(service: BufferService) -> set[int]:
        return {group.version for group in service.state.admission.open.values()}

    async with opened(tmp_path) as service:
        for version in range(2):
            await step(service, version)
        await tickets(service, 2)
        assert open_versions(service) == {2}
        await sync(service, 0)
        assert open_versions(service) == {0}
    with pytest.raises(ProtocolError, match="resume with the data and the seed"):
        async with opened(tmp_path, None, FakePrompts(num_train=2)):
            pass
    async with opened(tmp_path) as service:
        assert open_versions(service) == {0}
    # The row of a finished group still tells what it was sampled with.
    assert rows(tmp_path, "SELECT max(version) FROM groups WHERE state='ready'") == [(1,)]


@pytest.mark.parametrize("has_restarted", [True, False])
async def test_a_parked_take_of_a_learner_that_restarted_or_dropped_a_batch_leases_nothing(
    has_restarted: bool, service: BufferService
) -> None:
    given = await tickets(service, 0)
    for ticket in given[:2]:
        await put(service, ticket)
    assert await taken_ids(service, 0) == [0, 1]
    parked = asyncio.create_task(take(service, 1, wait_s=60))
    await settle()
    if has_restarted:
        await sync(service, 0)
    else:
        await service.drop_batch(DropBatch(train_version=0, group_ids=[0, 1], message="bad"))
    assert (await within(parked)).groups == []
    for ticket in given[2:]:
        await put(service, ticket)
    assert service.state.queue()["ready"] == (4 if has_restarted else 2)


async def test_trajectories_that_were_forgotten_are_a_clear_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for version in range(2):
            await step(service, version)
        await take(service, 2)
        await forget(service, 3)
        assert len(await service.store.reader.groups([0, 1])) == 2
        await forget(service, 1)
        # Those of the later step, of the leased batch, and the ready ones.
        ready = list(service.state.replay.ready)
        assert len(await service.store.reader.groups([2, 3, 4, 5, *ready])) == 4 + len(ready)
        for group_id in (0, 1):
            with pytest.raises(InfrastructureError, match="no longer contains the trajectories"):
                await service.store.reader.groups([group_id])
    async with opened(tmp_path) as service:
        with pytest.raises(ProtocolError, match=r"of steps up to 1 are deleted.*restore that"):
            await sync(service, 0)
        assert await taken_ids(service, 2) == [4, 5]
        await sync(service, 1)
        assert await taken_ids(service, 1) == [2, 3]


async def test_a_start_that_is_reported_twice_undoes_steps_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for version in range(2):
            await step(service, version)
        await asyncio.gather(sync(service, 0, "second"), sync(service, 0, "second"))
        leased = await taken_ids(service, 0)
        # A repeated request that comes late must not take the batch away from its learner.
        await sync(service, 0, "second")
        await commit(service, 1, leased)
    query = "SELECT state FROM transitions WHERE group_id=0 ORDER BY transition_id"
    history = [state for (state,) in rows(tmp_path, query)]
    assert history == ["generating", "ready", "leased", "trained", "ready", "leased", "trained"]
