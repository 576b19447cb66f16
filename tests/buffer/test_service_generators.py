"""The buffer's replies to generators: tickets, puts, failures, and what becomes of lost groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_support import (
    Clock,
    FakePrompts,
    commit,
    fail,
    make_config,
    make_group,
    make_trajectory,
    opened,
    problems,
    put,
    put_all,
    settle,
    states,
    step,
    take,
    taken_ids,
    tickets,
    within,
)
from composing import compose_unchecked

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.core.errors import Superseded
from async_rl.core.heads import pack_group
from async_rl.core.types import Ticket
from async_rl.protocol.buffer import PutGroup


def queue(service: BufferService) -> list[int]:
    """Issued, generating, ready and leased training groups."""
    return list(service.state.queue().values())


def attempts(given: list[Ticket]) -> list[tuple[int, int]]:
    return [(ticket.group_id, ticket.attempt) for ticket in given]


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


async def test_groups_that_arrive_together_are_committed_and_answered_together(
    service: BufferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await tickets(service, 0)
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
    assert answered == [len(given)] == [4]
    assert len(service.state.replay.ready) == len(given)


async def test_a_newer_request_of_a_generator_answers_its_parked_one(
    service: BufferService,
) -> None:
    # A report of a version does not wait.
    assert await within(tickets(service, 0, credit=0, wait_s=60)) == []
    held = [t.group_id for t in await tickets(service, 0)]
    parked = asyncio.create_task(tickets(service, 0, held=held, wait_s=60))
    await settle()
    assert await tickets(service, 0, held=held) == []
    assert await parked == []
    # Those of a process that another one has replaced are its own.
    again = await tickets(service, 0, incarnation="b", held=[])
    assert attempts(again) == [(group_id, 2) for group_id in held]
    with pytest.raises(Superseded, match="generator-0 runs as another process since"):
        await tickets(service, 0)


async def test_tickets_lost_with_a_reply_are_given_again_with_the_same_attempt(
    service: BufferService,
) -> None:
    await step(service, 0)
    assert {ticket.admitted_version for ticket in await tickets(service, 1)} == {1}
    again = await tickets(service, 0, held=[2, 4], credit=1)
    # For the present weights of the generator.
    assert [(t.group_id, t.attempt, t.admitted_version) for t in again] == [(5, 1, 0)]


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
        held = await put_all(service)
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


async def test_results_of_an_older_attempt_change_nothing_and_a_lost_group_may_still_arrive(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, max_staleness=0) as service:
        first = await tickets(service, 0)
        service.lose("generator-0", "its process ended")
        assert queue(service) == [2, 0, 0, 0]
        second = await tickets(service, 0, generator="generator-1")
        assert attempts(second) == [(0, 2), (1, 2)]
        await put(service, first[0])
        await fail(service, 1, attempt=1)
        assert queue(service) == [0, 2, 0, 0]
        service.lose("generator-1", "its process ended")
        await put(service, second[0], generator="generator-1")
        assert queue(service) == [1, 0, 1, 0]
        assert attempts(await tickets(service, 0)) == [(1, 3)]


async def test_only_attempts_that_failed_count_and_the_group_is_dropped_after_the_last(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, max_attempts=2, max_staleness=0) as service:
        for attempt in range(1, 6):
            assert attempts(await tickets(service, 0)) == [(0, attempt), (1, attempt)]
            service.lose("generator-0", "it left the fleet", is_spared=True)
        assert not service.state.drops
        for attempt in (6, 7):
            await tickets(service, 0)
            await fail(service, 0, attempt)
            service.lose("generator-0", "its process ended")
        assert service.state.drops == {"scoring_failed": 1, "generator_lost": 1}
        assert [t.group_id for t in await tickets(service, 0)] == [2, 3]
    assert states(tmp_path)[0] == "dropped"


@pytest.mark.proves("buffer.uniform_groups")
@pytest.mark.parametrize(("choice", "is_replaced"), [("train", False), ("replace", True)])
async def test_a_group_without_a_gradient_is_replaced_and_counted(
    tmp_path: Path, choice: str, is_replaced: bool
) -> None:
    """Without a trained token always, with equal rewards where that is asked for."""
    config = make_config(max_staleness=0, uniform_groups=choice)

    async def put_mixed(ticket: Ticket) -> None:
        group = make_group(ticket)
        samples = [make_trajectory([0], passes=False), *group.trajectories[1:]]
        group = msgspec.structs.replace(group, trajectories=samples)
        await service.put_group(PutGroup(payload=pack_group(group)))

    async with opened(tmp_path, config) as service:
        mixed, uniform = await tickets(service, 0)
        await put_mixed(mixed)
        await put(service, uniform)
        assert service.state.drops["no_signal"] == int(is_replaced)
        # The freed place is admitted again, at the same version and for the same batch.
        for ticket in await tickets(service, 0):
            await put_mixed(ticket)
        batch = await taken_ids(service, 0)
        assert batch == ([0, 2] if is_replaced else [0, 1])
        await commit(service, 1, batch)
        first, _ = await tickets(service, 1)
        await put(service, first, trained=False)
        assert service.state.drops["untrainable"] == 1
        assert queue(service)[2] == 0
        assert len(await tickets(service, 1, held=[first.group_id + 1])) == 1
    assert problems(tmp_path, config) == []


async def test_the_ticket_of_a_generator_that_is_not_listed_is_lost_after_a_whole_lease(
    tmp_path: Path,
) -> None:
    clock = Clock()
    settings: Any = {"lease_s": 30, "max_attempts": 2, "clock": clock}
    async with opened(tmp_path, **settings) as service:
        await tickets(service, 0)
        assert service.expire([]) == pytest.approx(30)
        clock.now += 29
        assert service.expire([]) == pytest.approx(1)
    async with opened(tmp_path, **settings) as service:
        assert service.expire([]) == pytest.approx(30), "the buffer was away"
        held = [0, 1, 2, 3]
        parked = asyncio.create_task(tickets(service, 0, held=held, wait_s=60))
        await settle()
        clock.now += 30
        assert service.expire(["generator-0"]) == pytest.approx(30)
        assert queue(service) == [0, 4, 0, 0]
        service.expire([])
        assert await parked == [], "it is not handed the groups that it lost"
        assert queue(service) == [4, 0, 0, 0]
        await tickets(service, 0)
        clock.now += 30
        service.expire([])
        assert service.state.drops == {"generator_lost": 4}, "it counts as an attempt"


async def test_a_single_ticket_that_is_never_answered_goes_out_again(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, lease_s=30, clock=clock) as service:
        await tickets(service, 0, credit=1)
        clock.now += 149
        assert service.expire(["generator-0"]) == pytest.approx(1)
        clock.now += 1
        service.expire(["generator-0"])
        assert queue(service) == [1, 0, 0, 0]
