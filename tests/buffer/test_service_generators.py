"""What the buffer answers to generators: tickets, puts, failures, and what becomes of those that
are lost.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from buffer_support import (
    Clock,
    FakePrompts,
    ask,
    fail,
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

from async_rl.core.errors import ProtocolError
from async_rl.protocol.buffer import PutGroup, ReleaseGenerator, Work
from async_rl.protocol.learner import CommitStep, ReadSequences, Sequences


def test_groups_go_from_ticket_to_trained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            assert [(t.group_id, t.attempt, t.prompt.prompt_id, t.num_samples) for t in given] == [
                (0, 1, "t0", 2),
                (1, 1, "t1", 2),
                (2, 1, "t2", 2),
                (3, 1, "t3", 2),
            ]
            for ticket in reversed(given):
                await service.put_group(PutGroup(group=make_group(ticket)))
            assert service.state.queue() == {"issued": 0, "generating": 0, "ready": 4, "leased": 0}
            batch = await take(service, 0)
            assert [g.group_id for g in batch.groups] == [0, 1]
            sequences = await service.read_sequences(
                ReadSequences(train_version=0, samples=[(0, 0)])
            )
            assert isinstance(sequences, Sequences)
            assert sequences.trajectories[0].versions.tolist() == [-1, -1, 0, 0, 0]
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
        assert states(tmp_path) == {0: "trained", 1: "trained", 2: "ready", 3: "ready"}

    run(scenario())


def test_prompts_repeat_when_the_data_is_smaller_than_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(
            tmp_path, make_config(groups_per_step=4, max_staleness=0), FakePrompts(num_train=3)
        ) as service:
            assert [t.prompt.prompt_id for t in await tickets(service, 0)] == [
                "t0",
                "t1",
                "t2",
                "t0",
            ]

    run(scenario())


def test_a_parked_request_is_answered_by_the_commit_that_frees_admission(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await put_all(service)
            await take(service, 0)
            parked = asyncio.create_task(service.request_work(ask(1, wait_s=60)))
            await settle()
            assert not parked.done()
            assert service.waits_for().startswith("admission: 4 groups are active")
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            work = await parked
            assert isinstance(work, Work)
            assert [t.group_id for t in work.tickets] == [4, 5]
            assert service.waits_for() == ""

    run(scenario())


def test_a_request_that_gets_nothing_within_its_wait_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await tickets(service, 0)
            work = await service.request_work(ask(0, wait_s=0.01))
            assert isinstance(work, Work)
            assert work.tickets == []
            assert "4 groups are active" in work.waits_for

    run(scenario())


def test_synchronous_training_admits_the_next_batch_only_with_the_new_weights(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            assert await put_all(service) == [0, 1]
            assert await tickets(service, 0) == []
            await take(service, 0)
            assert await tickets(service, 0) == []
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            assert await tickets(service, 0) == []
            assert [t.group_id for t in await tickets(service, 1)] == [2, 3]

    run(scenario())


def test_telling_a_new_version_opens_admission_for_the_parked_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            await put_all(service)
            await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            parked = asyncio.create_task(service.request_work(ask(0, wait_s=60)))
            await settle()
            told = await service.request_work(ask(1, credit=0))
            assert isinstance(told, Work)
            assert told.tickets == []
            work = await parked
            assert isinstance(work, Work)
            assert [t.group_id for t in work.tickets] == [2, 3]

    run(scenario())


def test_a_newer_request_of_a_generator_answers_its_parked_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            held = [t.group_id for t in await tickets(service, 0)]
            parked = asyncio.create_task(service.request_work(ask(0, wait_s=60)))
            await settle()
            assert await tickets(service, 0, held=held) == []
            work = await parked
            assert isinstance(work, Work)
            assert work.tickets == []

    run(scenario())


def test_tickets_lost_with_a_reply_are_given_again_with_the_same_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await tickets(service, 0)
            again = await tickets(service, 0, held=[0, 2], credit=2)
            assert [(t.group_id, t.attempt) for t in again] == [(1, 1), (3, 1)]

    run(scenario())


def test_parked_generators_share_what_is_freed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(groups_per_step=4, max_staleness=0)) as service:
            held = await put_all(service)
            await take(service, 0)
            parked = [
                asyncio.create_task(service.request_work(ask(0, generator=name, wait_s=60)))
                for name in ("a", "b")
            ]
            await settle()
            await service.commit_step(CommitStep(version=1, group_ids=held))
            for name in ("a", "b"):
                await service.request_work(ask(1, generator=name, credit=0))
            works = [await p for p in parked]
            assert [len(w.tickets) for w in works if isinstance(w, Work)] == [2, 2]

    run(scenario())


def test_results_of_an_older_attempt_change_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            first = await tickets(service, 0)
            await service.release_generator(
                ReleaseGenerator(generator="generator-0", incarnation="")
            )
            second = await tickets(service, 0, generator="generator-1")
            assert [t.attempt for t in second] == [2, 2]
            await service.put_group(PutGroup(group=make_group(first[0])))
            await fail(service, 1, attempt=1)
            assert service.state.queue() == {"issued": 0, "generating": 2, "ready": 0, "leased": 0}

    run(scenario())


def test_attempts_that_ended_because_a_generator_was_asked_to_leave_do_not_use_a_group_up(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            for attempt in range(1, 6):
                assert [t.attempt for t in await tickets(service, 0)] == [attempt, attempt]
                service.lose("generator-0", "it left the fleet", is_spared=True)
            assert not service.state.drops
            for _ in range(make_config().generation.max_attempts):
                await tickets(service, 0)
                service.lose("generator-0", "its process ended")
            assert service.state.drops == {"generator_lost": 2}

    run(scenario())


def test_a_lost_group_that_still_arrives_before_it_is_issued_again_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            first = await tickets(service, 0)
            await service.release_generator(
                ReleaseGenerator(generator="generator-0", incarnation="a")
            )
            assert service.state.queue()["issued"] == 2
            await service.put_group(PutGroup(group=make_group(first[0])))
            assert service.state.queue() == {"issued": 1, "generating": 0, "ready": 1, "leased": 0}
            assert [t.group_id for t in await tickets(service, 0)] == [1]

    run(scenario())


def test_a_put_that_comes_twice_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            for _ in range(2):
                await service.put_group(PutGroup(group=make_group(given[0])))
            assert service.state.queue()["ready"] == 1

    run(scenario())


def test_a_group_of_another_run_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "", make_config()) as service:
            stranger = (await tickets(service, 0))[3]
        other = tmp_path / "other"
        other.mkdir()
        async with opened(other, make_config()) as service:
            with pytest.raises(ProtocolError, match="group 3 was not issued here"):
                await service.put_group(PutGroup(group=make_group(stranger)))

    run(scenario())


def test_a_failed_group_is_dropped_and_counted_after_its_last_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_attempts=2, max_staleness=0)) as service:
            for attempt in (1, 2):
                given = await tickets(service, 0)
                assert (given[0].group_id, given[0].attempt) == (0, attempt)
                await fail(service, 0, attempt)
            assert service.state.drops == {"scoring_failed": 1}
            assert [t.group_id for t in await tickets(service, 0)] == [2]
        assert states(tmp_path)[0] == "dropped"

    run(scenario())


def test_a_group_without_a_trained_token_is_dropped_as_untrainable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            await service.put_group(PutGroup(group=make_group(given[0], trained=False)))
            assert service.state.drops == {"untrainable": 1}
            assert service.state.queue()["ready"] == 0
            assert len(await tickets(service, 0)) == 1

    run(scenario())


def test_a_new_incarnation_takes_over_from_the_lost_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            await tickets(service, 0, incarnation="a")
            again = await tickets(service, 0, incarnation="b", held=[])
            assert [(t.group_id, t.attempt) for t in again] == [(0, 2), (1, 2)]
            await service.release_generator(
                ReleaseGenerator(generator="generator-0", incarnation="a")
            )
            assert service.state.queue()["generating"] == 2

    run(scenario())


def test_a_generator_unheard_of_for_the_lease_time_loses_its_tickets_unless_it_is_known_to_live(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        clock = Clock()
        async with opened(tmp_path, make_config(lease_s=30), clock=clock) as service:
            await tickets(service, 0)
            assert service.expire([]) == pytest.approx(30)
            clock.now += 29
            assert service.expire([]) == pytest.approx(1)
            clock.now += 1
            assert service.expire(["generator-0"]) == pytest.approx(30)
            assert service.state.queue()["generating"] == 4
            clock.now += 30
            service.expire([])
            assert service.state.queue()["issued"] == 4

    run(scenario())


def test_a_single_ticket_that_is_never_answered_goes_out_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        async with opened(tmp_path, make_config(lease_s=30), clock=clock) as service:
            await tickets(service, 0, credit=1)
            clock.now += 149
            assert service.expire(["generator-0"]) == pytest.approx(1)
            clock.now += 1
            service.expire(["generator-0"])
            assert service.state.queue()["issued"] == 1

    run(scenario())
