"""The buffer's replies to generators: tickets, puts, failures, and what becomes of lost groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_support import (
    Clock,
    FakePrompts,
    ask,
    commit,
    fail,
    make_config,
    opened,
    put,
    put_all,
    settle,
    states,
    step,
    take,
    tickets,
    within,
)
from composing import compose_unchecked

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.core.errors import Superseded
from async_rl.protocol.buffer import Work
from async_rl.protocol.learner import ReadSequences, Sequences


def queue(service: BufferService) -> list[int]:
    """Issued, generating, ready and leased training groups."""
    return list(service.state.queue().values())


async def test_groups_go_from_ticket_to_trained(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        given = await tickets(service, 0)
        assert [(t.group_id, t.attempt, t.prompt.prompt_id, t.num_samples) for t in given] == [
            (number, 1, f"t{number}", 2) for number in range(4)
        ]
        for ticket in reversed(given):
            await put(service, ticket)
        assert queue(service) == [0, 0, 4, 0]
        assert [g.group_id for g in (await take(service, 0)).groups] == [0, 1]
        sequences = await service.read_sequences(ReadSequences(train_version=0, samples=[(0, 0)]))
        assert isinstance(sequences, Sequences)
        assert sequences.trajectories[0].unpacked().versions.tolist() == [-1, -1, 0, 0, 0]
        await commit(service, 1, [0, 1])
    assert states(tmp_path) == {0: "trained", 1: "trained", 2: "ready", 3: "ready"}


async def test_a_ticket_has_the_newest_responses_to_its_prompt_if_the_engine_has_drafts(
    tmp_path: Path,
) -> None:
    drafts = """generation.vllm.extra=['speculative_config={"method":"ngram"}']"""
    with_drafts = compose_unchecked("ppo_code", [drafts, "generation.group_size=2"])
    config = replace(make_config(), generation=with_drafts.generation)

    async def drafts_of_next(service: BufferService, num_written: int) -> list[int]:
        (ticket,) = await tickets(service, 0, credit=1)
        await put(service, ticket, versions=[0] * num_written)
        return np.frombuffer(ticket.sampling.drafts, np.int32).tolist()

    prompts = FakePrompts(num_train=1)
    async with opened(tmp_path / "drafts", config, prompts) as service:
        assert await drafts_of_next(service, 1) == []
        # The end of the prompt is before each response of the group.
        assert await drafts_of_next(service, 2) == [1, 2, 3] * 2
    async with opened(tmp_path / "drafts", config, prompts) as service:
        assert await drafts_of_next(service, 1) == [1, 2, 3, 4] * 2
    async with opened(tmp_path / "none", prompts=prompts) as service:
        await drafts_of_next(service, 1)
        assert await drafts_of_next(service, 1) == []


async def test_a_parked_request_is_answered_by_the_commit_that_frees_admission(
    service: BufferService,
) -> None:
    await put_all(service)
    await take(service, 0)
    refused = await service.request_work(ask(1, wait_s=0.01))
    assert isinstance(refused, Work)
    assert "4 groups are active" in refused.waits_for
    parked = asyncio.create_task(tickets(service, 1, wait_s=60))
    await settle()
    assert not parked.done()
    assert service.waits_for().startswith("admission: 4 groups are active")
    await commit(service, 1, [0, 1])
    assert [t.group_id for t in await parked] == [4, 5]
    assert service.waits_for() == ""


async def test_groups_that_arrive_together_are_committed_and_answered_together(
    service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await tickets(service, 0)
    assert len(given) > 2
    answered: list[int] = []
    end_after_commit = service.store.end_after_commit
    monkeypatch.setattr(
        service.store,
        "end_after_commit",
        lambda flushes: (answered.append(len(flushes)), end_after_commit(flushes)),
    )
    # Those whose senders give up must not hold up the answers of the other requests.
    first, second, *puts = [asyncio.create_task(put(service, ticket)) for ticket in given]
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await within(asyncio.gather(*puts))
    assert answered == [len(given)]
    assert len(service.state.replay.ready) == len(given)


async def test_a_newer_version_opens_admission_for_the_parked_request(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        await step(service, 0)
        parked = asyncio.create_task(tickets(service, 0, credit=1, wait_s=60))
        await settle()
        assert await tickets(service, 1, credit=0) == []
        assert [t.group_id for t in await parked] == [2]


async def test_the_report_of_a_version_does_not_wait(service: BufferService) -> None:
    assert await within(tickets(service, 0, credit=0, wait_s=60), 5) == []


async def test_a_newer_request_of_a_generator_answers_its_parked_one(
    service: BufferService,
) -> None:
    held = [t.group_id for t in await tickets(service, 0)]
    parked = asyncio.create_task(tickets(service, 0, wait_s=60))
    await settle()
    assert await tickets(service, 0, held=held) == []
    assert await parked == []


async def test_tickets_lost_with_a_reply_are_given_again_with_the_same_attempt(
    service: BufferService,
) -> None:
    await tickets(service, 0)
    again = await tickets(service, 0, held=[0, 2], credit=2)
    assert [(t.group_id, t.attempt) for t in again] == [(1, 1), (3, 1)]


async def test_parked_generators_share_the_freed_tickets(tmp_path: Path) -> None:
    async with opened(tmp_path, groups_per_step=4, max_staleness=0) as service:
        held = await put_all(service)
        await take(service, 0)
        parked = [
            asyncio.create_task(tickets(service, 0, generator=name, wait_s=60)) for name in "ab"
        ]
        await settle()
        await commit(service, 1, held)
        for name in "ab":
            await tickets(service, 1, generator=name, credit=0)
        assert [len(await task) for task in parked] == [2, 2]


async def test_a_generator_that_lags_keeps_a_share_of_its_credit_and_no_more(
    tmp_path: Path,
) -> None:
    settings: Any = {"groups_per_step": 3, "max_staleness": 0, "group_size": 1}
    async with opened(tmp_path, **settings) as service:
        (ticket,) = await tickets(service, 0, credit=1)
        await put(service, ticket)
        held = [ticket.group_id, *await put_all(service)]
        await take(service, 0)
        lagging, present = (
            asyncio.create_task(tickets(service, version, generator=name, credit=credit, wait_s=60))
            for version, name, credit in ((0, "a", 1), (1, "b", 8))
        )
        await settle()
        await commit(service, 1, held)
        assert [t.group_id for t in await present] == [3, 4]
        assert await tickets(service, 1, generator="a", credit=0) == []
        assert [t.group_id for t in await lagging] == [5]


async def test_results_of_an_older_attempt_change_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        first = await tickets(service, 0)
        service.lose("generator-0", "its process ended")
        second = await tickets(service, 0, generator="generator-1")
        assert [t.attempt for t in second] == [2, 2]
        await put(service, first[0])
        await fail(service, 1, attempt=1)
        assert queue(service) == [0, 2, 0, 0]


async def test_attempts_of_a_generator_that_was_asked_to_leave_do_not_count(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        for attempt in range(1, 6):
            assert [t.attempt for t in await tickets(service, 0)] == [attempt, attempt]
            service.lose("generator-0", "it left the fleet", is_spared=True)
        assert not service.state.drops
        for _ in range(make_config().generation.max_attempts):
            await tickets(service, 0)
            service.lose("generator-0", "its process ended")
        assert service.state.drops == {"generator_lost": 2}


async def test_a_lost_group_that_arrives_before_it_is_issued_again_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        first = await tickets(service, 0)
        service.lose("generator-0", "its process ended")
        assert queue(service) == [2, 0, 0, 0]
        await put(service, first[0])
        assert queue(service) == [1, 0, 1, 0]
        assert [t.group_id for t in await tickets(service, 0)] == [1]


async def test_a_failed_group_is_dropped_and_counted_after_its_last_attempt(tmp_path: Path) -> None:
    async with opened(tmp_path, max_attempts=2, max_staleness=0) as service:
        for attempt in (1, 2):
            given = await tickets(service, 0)
            assert (given[0].group_id, given[0].attempt) == (0, attempt)
            await fail(service, 0, attempt)
        assert service.state.drops == {"scoring_failed": 1}
        assert [t.group_id for t in await tickets(service, 0)] == [2]
    assert states(tmp_path)[0] == "dropped"


async def test_a_group_without_a_trained_token_is_dropped_as_untrainable(
    service: BufferService,
) -> None:
    await put(service, (await tickets(service, 0))[0], trained=False)
    assert service.state.drops == {"untrainable": 1}
    assert queue(service)[2] == 0
    assert len(await tickets(service, 0)) == 1


async def test_a_new_incarnation_gets_the_groups_of_the_lost_one(tmp_path: Path) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        await tickets(service, 0, incarnation="a")
        again = await tickets(service, 0, incarnation="b", held=[])
        assert [(t.group_id, t.attempt) for t in again] == [(0, 2), (1, 2)]
        with pytest.raises(Superseded, match="generator-0 runs as another process since"):
            await tickets(service, 0, incarnation="a")
        assert queue(service) == [0, 2, 0, 0]


async def test_the_ticket_of_a_generator_that_is_not_listed_goes_out_again_after_a_lease(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        await tickets(service, 0)
        assert service.expire([]) == pytest.approx(30)
        clock.now += 29
        assert service.expire([]) == pytest.approx(1)
        clock.now += 1
        assert service.expire(["generator-0"]) == pytest.approx(30)
        assert queue(service) == [0, 4, 0, 0]
        service.expire([])
        assert queue(service) == [4, 0, 0, 0]


async def test_what_a_generator_that_left_loses_counts_as_an_attempt(tmp_path: Path) -> None:
    clock = Clock()
    config = make_config(max_attempts=1, lease_s=30)
    async with opened(tmp_path, config, clock=clock) as service:
        await tickets(service, 0)
        clock.now += 30
        service.expire([])
        assert service.state.drops == {"generator_lost": 4}


async def test_a_generator_that_left_is_not_handed_the_groups_that_it_lost(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        held = [t.group_id for t in await tickets(service, 0)]
        parked = asyncio.create_task(tickets(service, 0, held=held, wait_s=60))
        await settle()
        clock.now += 30
        service.expire([])
        assert await parked == []
        assert queue(service) == [4, 0, 0, 0]


async def test_generators_of_a_restarted_buffer_have_a_whole_lease(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        await tickets(service, 0)
    clock.now += 29
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        assert service.expire([]) == pytest.approx(30)
        assert queue(service) == [0, 4, 0, 0]


async def test_a_single_ticket_that_is_never_answered_goes_out_again(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        await tickets(service, 0, credit=1)
        clock.now += 149
        assert service.expire(["generator-0"]) == pytest.approx(1)
        clock.now += 1
        service.expire(["generator-0"])
        assert queue(service) == [1, 0, 0, 0]
