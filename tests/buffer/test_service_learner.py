"""What the buffer answers to the learner: batches, commits, going back; and what a restart of the
buffer keeps of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
from buffer_support import (
    FakePrompts,
    ask,
    make_config,
    make_group,
    opened,
    put_all,
    run,
    settle,
    states,
    take,
    tickets,
)

from async_rl.buffer.service import BufferService
from async_rl.core.errors import InfrastructureError, ProtocolError
from async_rl.protocol.buffer import PutGroup, ReleaseGenerator, Work
from async_rl.protocol.learner import (
    CommitStep,
    DropBatch,
    ForgetBefore,
    ReadSequences,
    Sequences,
    SyncVersion,
    TakeBatch,
    TakenGroups,
)


def test_a_take_is_parked_until_its_last_group_is_put(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            parked = asyncio.create_task(service.take_batch(TakeBatch(train_version=0, wait_s=60)))
            await service.put_group(PutGroup(group=make_group(given[0])))
            assert not parked.done()
            assert service.waits_for() == "groups: 1 of 2 groups are ready for step 1"
            await service.put_group(PutGroup(group=make_group(given[1])))
            batch = await parked
            assert isinstance(batch, TakenGroups)
            assert [g.group_id for g in batch.groups] == [0, 1]

    run(scenario())


def test_a_parked_take_says_when_no_generator_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            parked = asyncio.create_task(service.take_batch(TakeBatch(train_version=0, wait_s=60)))
            await settle()
            assert (
                service.waits_for()
                == "groups: 0 of 2 groups are ready for step 1; no generator requests work"
            )
            parked.cancel()
            await asyncio.gather(parked, return_exceptions=True)

    run(scenario())


def test_a_take_that_gets_nothing_within_its_wait_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            batch = await take(service, 0, wait_s=0.01)
            assert batch.groups == []
            assert "0 of 2" in batch.waits_for

    run(scenario())


def test_dropping_over_age_groups_lets_fresh_ones_be_admitted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            for ticket in await tickets(service, 0):
                await service.put_group(PutGroup(group=make_group(ticket)))
            await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            mislabelled = await tickets(service, 1)
            for ticket in mislabelled:
                await service.put_group(PutGroup(group=make_group(ticket, versions=[0, 1])))
            parked = asyncio.create_task(service.request_work(ask(1, wait_s=60)))
            await settle()
            batch = await take(service, 1)
            assert batch.groups == []
            work = await parked
            assert isinstance(work, Work)
            assert [t.group_id for t in work.tickets] == [4, 5]
            assert service.state.drops == {"over_age": 2}

    run(scenario())


def test_a_batch_waits_for_the_group_that_would_be_too_old_after_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            slow, *others = await tickets(service, 0)
            for ticket in others:
                await service.put_group(PutGroup(group=make_group(ticket)))
            assert [g.group_id for g in (await take(service, 0)).groups] == [1, 2]
            await service.commit_step(CommitStep(version=1, group_ids=[1, 2]))
            await put_all(service, 1)
            assert service.state.queue() == {"issued": 0, "generating": 1, "ready": 3, "leased": 0}
            assert "group 0, which is still generated" in (await take(service, 1)).waits_for
            await service.put_group(PutGroup(group=make_group(slow)))
            assert [g.group_id for g in (await take(service, 1)).groups] == [0, 3]
            assert service.state.drops == {}

    run(scenario())


def test_unfinished_groups_may_be_as_old_as_the_version_that_the_learner_went_back_to(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            for version in range(2):
                await put_all(service, version)
                ids = [g.group_id for g in (await take(service, version)).groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
            given = await tickets(service, 2)
            assert {t.admitted_version for t in given} == {2}
            await service.sync_version(SyncVersion(version=1))
            assert {g.version for g in service.state.admission.open.values()} == {1}

    run(scenario())


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    config, prompts = make_config(max_staleness=2), FakePrompts()

    async def before() -> None:
        async with opened(tmp_path, config, prompts) as service:
            given = await tickets(service, 0)
            for ticket in given[:3]:
                await service.put_group(PutGroup(group=make_group(ticket)))
            await take(service, 0)
            await service.release_generator(
                ReleaseGenerator(generator="generator-0", incarnation="")
            )
            assert len(await tickets(service, 0, generator="generator-1", credit=1)) == 1

    async def after() -> None:
        async with opened(tmp_path, config, prompts) as service:
            assert service.state.queue() == {"issued": 2, "generating": 1, "ready": 1, "leased": 2}
            batch = await take(service, 0)
            assert [(g.group_id, len(g.samples)) for g in batch.groups] == [(0, 2), (1, 2)]
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            again = await tickets(service, 1, generator="generator-2")
            assert [(t.group_id, t.attempt) for t in again] == [(4, 2), (5, 2), (6, 1), (7, 1)]
            assert again[2].prompt.prompt_id == "t1"

    run(before())
    run(after())


def test_a_generator_that_outlived_the_buffer_can_still_put_its_group(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
        async with opened(tmp_path, make_config()) as service:
            await service.put_group(PutGroup(group=make_group(given[0])))
            assert service.state.queue() == {"issued": 0, "generating": 3, "ready": 1, "leased": 0}
            assert await tickets(service, 0, held=[1, 2, 3]) == []

    run(scenario())


def test_changed_data_is_refused_at_the_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await tickets(service, 0)
        with pytest.raises(ProtocolError, match="resume with the data and the seed"):
            async with opened(tmp_path, make_config(), FakePrompts(num_train=2)):
                pass

    run(scenario())


def test_a_learner_that_goes_back_trains_the_undone_batches_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            seen = []
            for version in range(3):
                await put_all(service, version)
                batch = await take(service, version)
                seen.append([g.group_id for g in batch.groups])
                await service.commit_step(CommitStep(version=version + 1, group_ids=seen[-1]))
            assert list(states(tmp_path).values()).count("trained") == 6
            await service.sync_version(SyncVersion(version=1))
            assert list(states(tmp_path).values()).count("trained") == 2
            for version in (1, 2):
                batch = await take(service, version)
                assert [g.group_id for g in batch.groups] == seen[version]
                assert len(batch.groups[0].samples) == 2
                await service.commit_step(CommitStep(version=version + 1, group_ids=seen[version]))
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            assert service.state.replay.learner_version == 3
            assert list(states(tmp_path).values()).count("trained") == 6

    run(scenario())


def test_groups_generated_during_a_rollback_may_be_as_old_as_the_learner_after_a_restart_too(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            for version in range(2):
                await put_all(service, version)
                batch = await take(service, version)
                await service.commit_step(
                    CommitStep(version=version + 1, group_ids=[g.group_id for g in batch.groups])
                )
            given = await tickets(service, 2)
            assert {ticket.admitted_version for ticket in given} == {2}
            await service.sync_version(SyncVersion(version=1))
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            again = await tickets(service, 1, held=[])
            assert {t.group_id: t.admitted_version for t in again} == {t.group_id: 1 for t in given}

    run(scenario())


def test_a_ticket_that_got_lost_is_given_again_for_the_weights_that_the_generator_holds_now(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            await put_all(service, 0)
            batch = await take(service, 0)
            await service.commit_step(
                CommitStep(version=1, group_ids=[g.group_id for g in batch.groups])
            )
            assert {ticket.admitted_version for ticket in await tickets(service, 1)} == {1}
            assert {ticket.admitted_version for ticket in await tickets(service, 0, held=[])} == {0}

    run(scenario())


def test_a_parked_take_of_a_learner_that_restarted_leases_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            parked = asyncio.create_task(service.take_batch(TakeBatch(train_version=0, wait_s=60)))
            await settle()
            await service.sync_version(SyncVersion(version=0))
            batch = await parked
            assert isinstance(batch, TakenGroups)
            assert batch.groups == []
            for ticket in given[:2]:
                await service.put_group(PutGroup(group=make_group(ticket)))
            assert service.state.queue()["ready"] == 2

    run(scenario())


def test_a_learner_that_is_one_commit_ahead_is_caught_up_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await put_all(service)
            await take(service, 0)
            await service.sync_version(SyncVersion(version=1))
            assert list(states(tmp_path).values()).count("trained") == 2
        assert sorted(states(tmp_path).values()) == ["ready", "ready", "trained", "trained"]

    run(scenario())


def test_trajectories_that_were_forgotten_are_a_clear_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await put_all(service)
            await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            await service.forget_before(ForgetBefore(version=2))
            assert len(await service._store.reader.groups([0, 1])) == 2
            await service.forget_before(ForgetBefore(version=1))
            with pytest.raises(
                InfrastructureError, match="no longer contains the trajectories of group 0"
            ):
                await service._store.reader.groups([0])
            with pytest.raises(
                ProtocolError,
                match="starts at version 0, but the trajectories of steps up to 1 are deleted",
            ):
                await service.sync_version(SyncVersion(version=0))
        async with opened(tmp_path, make_config()) as service:
            with pytest.raises(ProtocolError, match="restore that checkpoint"):
                await service.sync_version(SyncVersion(version=0))
            assert [g.group_id for g in (await take(service, 1)).groups] == [2, 3]

    run(scenario())


async def trained_steps(service: BufferService, num_steps: int) -> None:
    """Generate, lease, read and commit the steps one after the other."""
    for version in range(num_steps):
        for ticket in await tickets(service, version):
            await service.put_group(PutGroup(group=make_group(ticket, versions=[version] * 3)))
        batch = await take(service, version)
        ids = [group.group_id for group in batch.groups]
        await service.commit_step(CommitStep(version=version + 1, group_ids=ids))


def test_tokens_of_discarded_weights_count_as_the_version_that_trains_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            await trained_steps(service, 3)
            # The learner goes back, and its repeated batch turns out to be bad.
            await service.sync_version(SyncVersion(version=1, incarnation="second"))
            bad = await take(service, 1)
            ids = [group.group_id for group in bad.groups]
            await service.drop_batch(DropBatch(train_version=1, group_ids=ids, message="bad"))
            batch = await take(service, 1)
            samples = [(group.group_id, 0) for group in batch.groups]
            assert samples
            read = await service.read_sequences(ReadSequences(train_version=1, samples=samples))
            assert isinstance(read, Sequences)
            assert {int(sample.versions.max()) for sample in read.trajectories} == {1}

    run(scenario())


def test_a_start_that_is_reported_twice_undoes_steps_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await trained_steps(service, 2)
            start = SyncVersion(version=0, incarnation="second")
            await asyncio.gather(service.sync_version(start), service.sync_version(start))
            leased = await take(service, 0)
            # A repeated request that comes late must not take the batch away from its learner.
            await service.sync_version(start)
            ids = [group.group_id for group in leased.groups]
            await service.commit_step(CommitStep(version=1, group_ids=ids))
        with contextlib.closing(sqlite3.connect(tmp_path / "store.sqlite")) as store:
            query = "SELECT state FROM transitions WHERE group_id=0 ORDER BY transition_id"
            history = [state for (state,) in store.execute(query)]
        assert history == ["generating", "ready", "leased", "trained", "ready", "leased", "trained"]

    run(scenario())
