"""The buffer's replies to the learner: batches, commits, going back; and its memory of them after a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
from buffer_support import (
    FakePrompts,
    commit,
    evaluate,
    forget,
    opened,
    put,
    put_all,
    settle,
    states,
    step,
    sync,
    take,
    taken_ids,
    tickets,
    within,
)

from async_rl.buffer.service import BufferService
from async_rl.core.errors import InfrastructureError, ProtocolError
from async_rl.protocol.learner import (
    DropBatch,
    ReadSequences,
    Sequences,
    SetAside,
)


def num_trained(path: Path) -> int:
    return list(states(path).values()).count("trained")


async def test_a_take_is_parked_until_its_last_group_is_put(
    service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    # New groups are in memory: a take waits for no read of the disk.
    monkeypatch.setattr(service.store.reader, "groups", None)
    missing = "0 of 2 groups are ready for step 1"
    assert await taken_ids(service, 0, wait_s=0.01) == []
    parked = asyncio.create_task(take(service, 0, wait_s=60))
    await settle()
    assert service.waits_for() == f"groups: {missing}; no generator requests work"
    given = await tickets(service, 0)
    await put(service, given[0])
    assert not parked.done()
    assert service.waits_for() == "groups: 1 of 2 groups are ready for step 1"
    await put(service, given[1])
    assert [g.group_id for g in (await parked).groups] == [0, 1]


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


async def test_only_the_groups_of_the_leased_batch_are_read(service: BufferService) -> None:
    ids = await put_all(service)
    leased = await taken_ids(service, 0)
    (other, *_) = sorted(set(ids) - set(leased))
    with pytest.raises(ProtocolError, match=rf"groups \[{other}\] are not leased for version 0"):
        await service.read_sequences(ReadSequences(train_version=0, samples=[(other, 0)]))


async def test_a_batch_waits_for_the_group_that_would_be_too_old_after_it(
    service: BufferService,
) -> None:
    slow, *others = await tickets(service, 0)
    for ticket in others:
        await put(service, ticket)
    assert await taken_ids(service, 0) == [1, 2]
    await commit(service, 1, [1, 2])
    await put_all(service, 1)
    assert await taken_ids(service, 1) == []
    await put(service, slow)
    assert await taken_ids(service, 1) == [0, 3]
    assert service.state.drops == {}


async def test_everything_survives_a_restart(tmp_path: Path) -> None:
    prompts = FakePrompts()
    async with opened(tmp_path, None, prompts, max_staleness=2) as service:
        for ticket in (await tickets(service, 0))[:3]:
            await put(service, ticket)
        await take(service, 0)
        service.lose("generator-0", "its process ended")
        assert len(await tickets(service, 0, generator="generator-1", credit=1)) == 1
    async with opened(tmp_path, None, prompts, max_staleness=2) as service:
        assert list(service.state.queue().values()) == [2, 1, 1, 2]
        batch = await take(service, 0)
        assert [(g.group_id, len(g.samples)) for g in batch.groups] == [(0, 2), (1, 2)]
        await commit(service, 1, [0, 1])
        again = await tickets(service, 1, generator="generator-2")
        assert [(t.group_id, t.attempt) for t in again] == [(4, 2), (5, 2), (6, 1), (7, 1)]
        assert again[2].prompt.prompt_id == "t1"


async def test_a_generator_that_outlived_the_buffer_can_put_its_group(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        given = await tickets(service, 0)
    async with opened(tmp_path) as service:
        await put(service, given[0])
        assert list(service.state.queue().values()) == [0, 3, 1, 0]
        assert await tickets(service, 0, held=[1, 2, 3]) == []


async def test_changed_data_is_refused_at_the_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await tickets(service, 0)
    with pytest.raises(ProtocolError, match="resume with the data and the seed"):
        async with opened(tmp_path, None, FakePrompts(num_train=2)):
            pass


async def test_a_learner_that_goes_back_trains_the_undone_batches_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        seen = [await step(service, version) for version in range(3)]
        assert num_trained(tmp_path) == 6
        await sync(service, 1)
        assert num_trained(tmp_path) == 2
        for version in (1, 2):
            batch = await take(service, version)
            assert [g.group_id for g in batch.groups] == seen[version]
            assert len(batch.groups[0].samples) == 2
            await commit(service, version + 1, seen[version])
    async with opened(tmp_path) as service:
        assert service.state.replay.learner_version == 3
        assert num_trained(tmp_path) == 6


async def test_what_the_version_has_to_which_the_learner_goes_back_stays(tmp_path: Path) -> None:
    async with opened(tmp_path, prompts=FakePrompts(num_held_out=1)) as service:
        for version in range(3):
            await evaluate(service, version)
            await step(service, version)
        await evaluate(service, 3)
        await sync(service, 1)
        await service.store.flush()
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
        for found in (
            "steps WHERE undone_s IS NULL AND 0 < version",
            "evaluations WHERE 0 < version",
            "groups WHERE evaluation > 0",
        ):
            column = "evaluation" if "groups" in found else "version"
            assert store.execute(f"SELECT {column} FROM {found}").fetchall() == [(1,)], found


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
    async with opened(tmp_path) as service:
        assert open_versions(service) == {0}
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
        # The row of a finished group still tells what it was sampled with.
        query = "SELECT max(version) FROM groups WHERE state='ready'"
        assert store.execute(query).fetchone() == (1,)


async def test_a_lost_ticket_is_given_again_for_the_present_weights_of_the_generator(
    service: BufferService,
) -> None:
    await step(service, 0)
    assert {ticket.admitted_version for ticket in await tickets(service, 1)} == {1}
    assert {ticket.admitted_version for ticket in await tickets(service, 0, held=[])} == {0}


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


async def test_a_learner_that_is_one_commit_ahead_has_trained_its_batch(
    service: BufferService, tmp_path: Path
) -> None:
    await put_all(service)
    await take(service, 0)
    await sync(service, 1)
    assert sorted(states(tmp_path).values()) == ["ready", "ready", "trained", "trained"]


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


async def test_tokens_of_discarded_weights_count_as_the_version_that_trains_them(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        for version in range(3):
            await step(service, version)
        # The learner goes back, and its repeated batch turns out to be bad.
        await sync(service, 1, "second")
        bad = await taken_ids(service, 1)
        await service.drop_batch(DropBatch(train_version=1, group_ids=bad, message="bad"))
        samples = [(group_id, 0) for group_id in await taken_ids(service, 1)]
        assert samples
        read = await service.read_sequences(ReadSequences(train_version=1, samples=samples))
        assert isinstance(read, Sequences)
        assert {int(sample.unpacked().versions.max()) for sample in read.trajectories} == {1}


async def test_dropped_batches_of_a_version_count_across_a_restart_of_the_buffer(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        async with opened(tmp_path) as service:
            await put_all(service)
            bad = await taken_ids(service, 0)
            drop = DropBatch(train_version=0, group_ids=bad, message="bad")
            assert await service.drop_batch(drop) == SetAside(num_batches=number)
            # A leased batch is none of them.
            await put_all(service)
            assert len(await taken_ids(service, 0)) == 2


async def test_a_start_that_is_reported_twice_undoes_steps_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        for version in range(2):
            await step(service, version)
        await asyncio.gather(sync(service, 0, "second"), sync(service, 0, "second"))
        leased = await taken_ids(service, 0)
        # A repeated request that comes late must not take the batch away from its learner.
        await sync(service, 0, "second")
        await commit(service, 1, leased)
    with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
        query = "SELECT state FROM transitions WHERE group_id=0 ORDER BY transition_id"
        history = [state for (state,) in store.execute(query)]
    assert history == ["generating", "ready", "leased", "trained", "ready", "leased", "trained"]
