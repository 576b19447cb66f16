from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from buffer_support import Clock, FakePrompts, ask, make_config, make_group, opened, settle, take, tickets, within

from async_rl.errors import ConfigError, InfrastructureError, ProtocolError
from async_rl.messages import (
    Batch,
    CommitStep,
    FailGroup,
    LimitStaleness,
    PutGroup,
    ReleaseGenerator,
    StartEvaluation,
    SyncVersion,
    TakeBatch,
    Work,
)
from async_rl.messages_history import ForgetBefore
from async_rl.processes.buffer_service import BufferService
from async_rl.processes.evaluation import report_of
from async_rl.store import KEPT_SAMPLES
from async_rl.types import Purpose


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(within(scenario, 30.0))


async def put_all(service: BufferService, version: int = 0) -> list[int]:
    given = await tickets(service, version)
    for ticket in given:
        await service.put_group(PutGroup(group=make_group(ticket)))
    return [t.group_id for t in given]


async def fail(service: BufferService, group_id: int, attempt: int, reason: str = "scoring_failed") -> None:
    await service.fail_group(
        FailGroup(group_id=group_id, attempt=attempt, generator="generator-0", reason=reason, message="no verifier answered")
    )


def states(path: Path) -> dict[int, str]:
    with sqlite3.connect(path / "store.sqlite") as connection:
        rows = dict(connection.execute("SELECT group_id, state FROM groups"))
    connection.close()
    return rows


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
            assert service.queue() == {"issued": 0, "generating": 0, "ready": 4, "leased": 0}
            batch = await take(service, 0)
            assert [g.group_id for g in batch.groups] == [0, 1]
            assert batch.groups[0].trajectories[0].versions.tolist() == [-1, -1, 0, 0, 0]
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
        assert states(tmp_path) == {0: "trained", 1: "trained", 2: "ready", 3: "ready"}

    run(scenario())


def test_prompts_repeat_when_the_data_is_smaller_than_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(groups_per_step=4, max_staleness=0), FakePrompts(num_train=3)) as service:
            assert [t.prompt.prompt_id for t in await tickets(service, 0)] == ["t0", "t1", "t2", "t0"]

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


def test_synchronous_training_admits_the_next_batch_only_with_the_new_weights(tmp_path: Path) -> None:
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


def test_a_lower_limit_makes_a_run_synchronous_and_a_higher_one_lets_it_run_ahead_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            await service.limit_staleness(LimitStaleness(max_staleness_versions=0))
            assert [t.group_id for t in await tickets(service, 0)] == [0, 1]
            await service.limit_staleness(LimitStaleness(max_staleness_versions=1))
            assert [t.group_id for t in await tickets(service, 0, held=[0, 1])] == [2, 3]
            with pytest.raises(ConfigError, match=r"max_staleness_versions=2 is not within 0\.\.1"):
                await service.limit_staleness(LimitStaleness(max_staleness_versions=2))

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
            parked = [asyncio.create_task(service.request_work(ask(0, generator=name, wait_s=60))) for name in ("a", "b")]
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
            await service.release_generator(ReleaseGenerator(generator="generator-0", incarnation=""))
            second = await tickets(service, 0, generator="generator-1")
            assert [t.attempt for t in second] == [2, 2]
            await service.put_group(PutGroup(group=make_group(first[0])))
            await fail(service, 1, attempt=1)
            assert service.queue() == {"issued": 0, "generating": 2, "ready": 0, "leased": 0}

    run(scenario())


def test_attempts_that_ended_because_a_generator_was_asked_to_leave_do_not_use_a_group_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            for attempt in range(1, 6):
                assert [t.attempt for t in await tickets(service, 0)] == [attempt, attempt]
                service.desk.lose("generator-0", "", "it left the fleet", is_spared=True)
            assert not service.drops
            for _ in range(service.desk._config.generation.max_attempts):
                await tickets(service, 0)
                service.desk.lose("generator-0", "", "its process ended")
            assert service.drops == {"generator_lost": 2}

    run(scenario())


def test_a_lost_group_that_still_arrives_before_it_is_issued_again_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            first = await tickets(service, 0)
            await service.release_generator(ReleaseGenerator(generator="generator-0", incarnation="a"))
            assert service.queue()["issued"] == 2
            await service.put_group(PutGroup(group=make_group(first[0])))
            assert service.queue() == {"issued": 1, "generating": 0, "ready": 1, "leased": 0}
            assert [t.group_id for t in await tickets(service, 0)] == [1]

    run(scenario())


def test_a_put_that_comes_twice_counts_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            for _ in range(2):
                await service.put_group(PutGroup(group=make_group(given[0])))
            assert service.queue()["ready"] == 1

    run(scenario())


def test_a_group_of_another_run_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "", make_config()) as service:
            stranger = (await tickets(service, 0))[3]
        other = tmp_path / "other"
        other.mkdir()
        async with opened(other, make_config()) as service:
            with pytest.raises(ProtocolError, match="never issued"):
                await service.put_group(PutGroup(group=make_group(stranger)))

    run(scenario())


def test_a_failed_group_is_dropped_and_counted_after_its_last_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_attempts=2, max_staleness=0)) as service:
            for attempt in (1, 2):
                given = await tickets(service, 0)
                assert (given[0].group_id, given[0].attempt) == (0, attempt)
                await fail(service, 0, attempt)
            assert service.drops == {"scoring_failed": 1}
            assert [t.group_id for t in await tickets(service, 0)] == [2]
        assert states(tmp_path)[0] == "dropped"

    run(scenario())


def test_a_group_without_a_trained_token_is_dropped_as_untrainable(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            given = await tickets(service, 0)
            await service.put_group(PutGroup(group=make_group(given[0], trained=False)))
            assert service.drops == {"untrainable": 1}
            assert service.queue()["ready"] == 0
            assert len(await tickets(service, 0)) == 1

    run(scenario())


def test_a_new_incarnation_takes_over_from_the_lost_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=0)) as service:
            await tickets(service, 0, incarnation="a")
            again = await tickets(service, 0, incarnation="b", held=[])
            assert [(t.group_id, t.attempt) for t in again] == [(0, 2), (1, 2)]
            await service.release_generator(ReleaseGenerator(generator="generator-0", incarnation="a"))
            assert service.queue()["generating"] == 2

    run(scenario())


def test_a_generator_unheard_of_for_the_lease_time_loses_its_tickets_unless_it_is_known_to_live(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        async with opened(tmp_path, make_config(lease_timeout_s=30), clock=clock) as service:
            await tickets(service, 0)
            assert service.expire([]) == pytest.approx(30)
            clock.now += 29
            assert service.expire([]) == pytest.approx(1)
            clock.now += 1
            assert service.expire(["generator-0"]) == pytest.approx(30)
            assert service.queue()["generating"] == 4
            clock.now += 30
            service.expire([])
            assert service.queue()["issued"] == 4

    run(scenario())


def test_a_single_ticket_that_is_never_answered_goes_out_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = Clock()
        async with opened(tmp_path, make_config(lease_timeout_s=30), clock=clock) as service:
            await tickets(service, 0, credit=1)
            clock.now += 149
            assert service.expire(["generator-0"]) == pytest.approx(1)
            clock.now += 1
            service.expire(["generator-0"])
            assert service.queue()["issued"] == 1

    run(scenario())


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
            assert isinstance(batch, Batch)
            assert [g.group_id for g in batch.groups] == [0, 1]

    run(scenario())


def test_a_parked_take_says_when_no_generator_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            parked = asyncio.create_task(service.take_batch(TakeBatch(train_version=0, wait_s=60)))
            await settle()
            assert service.waits_for() == "groups: 0 of 2 groups are ready for step 1; no generator asks for work"
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
            assert service.drops == {"over_age": 2}

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
            assert service.queue() == {"issued": 0, "generating": 1, "ready": 3, "leased": 0}
            assert "group 0, which is still generated" in (await take(service, 1)).waits_for
            await service.put_group(PutGroup(group=make_group(slow)))
            assert [g.group_id for g in (await take(service, 1)).groups] == [0, 3]
            assert service.drops == {}

    run(scenario())


def test_unfinished_groups_may_be_as_old_as_the_version_that_the_learner_went_back_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            for version in range(2):
                await put_all(service, version)
                ids = [g.group_id for g in (await take(service, version)).groups]
                await service.commit_step(CommitStep(version=version + 1, group_ids=ids))
            given = await tickets(service, 2)
            assert {t.admitted_version for t in given} == {2}
            await service.sync_version(SyncVersion(version=1))
            assert {g.version for g in service.desk.admission.open.values()} == {1}

    run(scenario())


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    config, prompts = make_config(max_staleness=2), FakePrompts()

    async def before() -> None:
        async with opened(tmp_path, config, prompts) as service:
            given = await tickets(service, 0)
            for ticket in given[:3]:
                await service.put_group(PutGroup(group=make_group(ticket)))
            await take(service, 0)
            await service.release_generator(ReleaseGenerator(generator="generator-0", incarnation=""))
            assert len(await tickets(service, 0, generator="generator-1", credit=1)) == 1

    async def after() -> None:
        async with opened(tmp_path, config, prompts) as service:
            assert service.queue() == {"issued": 2, "generating": 1, "ready": 1, "leased": 2}
            batch = await take(service, 0)
            assert [(g.group_id, len(g.trajectories)) for g in batch.groups] == [(0, 2), (1, 2)]
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
            assert service.queue() == {"issued": 0, "generating": 3, "ready": 1, "leased": 0}
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
            assert service.num_trained == 6
            await service.sync_version(SyncVersion(version=1))
            assert service.num_trained == 2
            for version in (1, 2):
                batch = await take(service, version)
                assert [g.group_id for g in batch.groups] == seen[version]
                assert len(batch.groups[0].trajectories) == 2
                await service.commit_step(CommitStep(version=version + 1, group_ids=seen[version]))
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            assert service.replay.learner_version == 3
            assert service.num_trained == 6

    run(scenario())


def test_what_is_generated_while_the_learner_goes_back_may_be_as_old_as_the_learner_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            for version in range(2):
                await put_all(service, version)
                batch = await take(service, version)
                await service.commit_step(CommitStep(version=version + 1, group_ids=[g.group_id for g in batch.groups]))
            given = await tickets(service, 2)
            assert {ticket.admitted_version for ticket in given} == {2}
            await service.sync_version(SyncVersion(version=1))
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            again = await tickets(service, 1, held=[])
            assert {t.group_id: t.admitted_version for t in again} == {t.group_id: 1 for t in given}

    run(scenario())


def test_a_ticket_that_got_lost_is_given_again_for_the_weights_that_the_generator_holds_now(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_staleness=1)) as service:
            await put_all(service, 0)
            batch = await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[g.group_id for g in batch.groups]))
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
            assert isinstance(batch, Batch)
            assert batch.groups == []
            for ticket in given[:2]:
                await service.put_group(PutGroup(group=make_group(ticket)))
            assert service.queue()["ready"] == 2

    run(scenario())


def test_a_learner_that_is_one_commit_ahead_is_caught_up_with(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await put_all(service)
            await take(service, 0)
            await service.sync_version(SyncVersion(version=1))
            assert service.num_trained == 2
        assert sorted(states(tmp_path).values()) == ["ready", "ready", "trained", "trained"]

    run(scenario())


def test_an_evaluation_is_reported_from_the_store_when_its_last_sample_is_in(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=4)

    async def scenario() -> None:
        async with opened(tmp_path, make_config(max_attempts=1), prompts) as service:
            for _ in range(2):
                await service.start_evaluation(StartEvaluation(version=0))
            given = await tickets(service, 0, credit=2)
            assert {t.purpose for t in given} == {Purpose.EVAL}
            assert {t.num_samples for t in given} == {1}
            assert service.queue()["generating"] == 0
            await service.put_group(PutGroup(group=make_group(given[1], passes=False, is_truncated=True)))
            await fail(service, given[2].group_id, 1)
        async with opened(tmp_path, make_config(max_attempts=1), prompts) as service:
            await service.put_group(PutGroup(group=make_group(given[3], versions=[0] * 5)))
            assert service.finished_evaluations.empty()
            await service.put_group(PutGroup(group=make_group(given[0])))
            assert service.finished_evaluations.get_nowait() == 0
            held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(4)]
            report = await report_of(service._store, 0, held_out, decode=str, extraction="auto")
            assert report.scalars == {
                "eval/pass_at_1": pytest.approx(2 / 3),
                "eval/pass_at_1_error": pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5),
                "eval/pass_at_k": pytest.approx(2 / 3),
                "eval/pass_at_k_error": pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5),
                "eval/maj_at_k": pytest.approx(2 / 3),
                "eval/maj_at_k_error": pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5),
                "eval/reward_mean": pytest.approx(2 / 3),
                "eval/reward_mean_error": pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5),
                "eval/version_mean": 0.0,
                "eval/num_samples": 3.0,
                "eval/length_mean": pytest.approx(11 / 3),
                "eval/truncated_share": pytest.approx(1 / 3),
            }
            assert report.num_failed == 1
            assert "**e1**: reward 0, style 0.5 (wrong_answer)" in report.texts["samples/evaluation"]
        async with opened(tmp_path, make_config(max_attempts=1), prompts) as service:
            assert service.finished_evaluations.get_nowait() == 0

    run(scenario())


def test_an_evaluation_draws_so_many_samples_of_each_prompt_as_are_asked_for(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=2)
    config = make_config()
    config = msgspec.structs.replace(config, evaluation=msgspec.structs.replace(config.evaluation, num_samples=3))

    async def scenario() -> None:
        async with opened(tmp_path, config, prompts) as service:
            await service.start_evaluation(StartEvaluation(version=0))
            given = [t for t in await tickets(service, 0, credit=4) if t.purpose is Purpose.EVAL]
            assert [t.num_samples for t in given] == [3, 3]
            await service.put_group(PutGroup(group=make_group(given[0])))
            await service.put_group(PutGroup(group=make_group(given[1], passes=False)))
            held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(2)]
            report = await report_of(service._store, 0, held_out, decode=str, extraction="auto")
            assert report.scalars["eval/num_samples"] == 6
            assert report.scalars["eval/pass_at_1"] == report.scalars["eval/pass_at_k"] == 0.5

    run(scenario())


def test_a_learner_that_came_back_to_an_evaluated_version_gets_it_told_again_with_the_samples_that_are_kept(tmp_path: Path) -> None:
    prompts = FakePrompts(num_held_out=KEPT_SAMPLES + 2)

    async def scenario() -> None:
        async with opened(tmp_path, make_config(), prompts) as service:
            await service.start_evaluation(StartEvaluation(version=0))
            for ticket in await tickets(service, 0, credit=20):
                if ticket.purpose is Purpose.EVAL:
                    await service.put_group(PutGroup(group=make_group(ticket)))
            assert service.finished_evaluations.get_nowait() == 0
            service._store.finish_evaluation(0, {"eval/num_samples": 18.0, "eval/pass_at_1": 0.25})
            await service._store.flush()
            await service.start_evaluation(StartEvaluation(version=0))
            assert service.finished_evaluations.get_nowait() == 0
            held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(prompts.num_held_out)]
            report = await report_of(service._store, 0, held_out, decode=str, extraction="auto")
            assert report.scalars == {"eval/num_samples": 18.0, "eval/pass_at_1": 0.25}
            assert "text of e0" in report.texts["samples/evaluation"]
            with pytest.raises(InfrastructureError, match="no longer holds the trajectories"):
                await service._store.read_groups([KEPT_SAMPLES])
            assert len(await service._store.read_groups([KEPT_SAMPLES - 1])) == 1

    run(scenario())


def test_a_finished_evaluation_of_an_undone_version_can_be_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(), FakePrompts(num_held_out=1)) as service:
            await put_all(service)
            await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            for version in (1, 1):
                await service.start_evaluation(StartEvaluation(version=1))
                given = await tickets(service, version, credit=1)
                assert given[0].purpose is Purpose.EVAL
                await service.put_group(PutGroup(group=make_group(given[0])))
                assert service.finished_evaluations.get_nowait() == 1
                await service.sync_version(SyncVersion(version=0))
                await take(service, 0)
                await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))

    run(scenario())


def test_evaluating_without_held_out_prompts_does_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config(), FakePrompts(num_held_out=0)) as service:
            await service.start_evaluation(StartEvaluation(version=0))
            assert {t.purpose for t in await tickets(service, 0)} == {Purpose.TRAIN}

    run(scenario())


def test_trajectories_that_were_forgotten_are_a_clear_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, make_config()) as service:
            await put_all(service)
            await take(service, 0)
            await service.commit_step(CommitStep(version=1, group_ids=[0, 1]))
            await service.forget_before(ForgetBefore(version=2))
            assert len(await service._store.read_groups([0, 1])) == 2
            await service.forget_before(ForgetBefore(version=1))
            with pytest.raises(InfrastructureError, match="no longer holds the trajectories of group 0"):
                await service._store.read_groups([0])
            with pytest.raises(ProtocolError, match="starts at version 0, but the trajectories of steps up to 1 are deleted"):
                await service.sync_version(SyncVersion(version=0))
        async with opened(tmp_path, make_config()) as service:
            with pytest.raises(ProtocolError, match="bring that checkpoint back"):
                await service.sync_version(SyncVersion(version=0))
            assert [g.group_id for g in (await take(service, 1)).groups] == [2, 3]

    run(scenario())
