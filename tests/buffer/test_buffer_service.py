"""The buffer's replies to generators and to the learner. Why generators get no ticket: outages of
what scores, and pools that are there for training or for evaluation alone.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_support import (
    Clock,
    FakePrompts,
    commit,
    evaluate,
    fail,
    forget,
    make_config,
    opened,
    problems,
    put,
    put_all,
    put_passes,
    settle,
    step,
    sync,
    take,
    taken_ids,
    tickets,
)
from composing import compose_unchecked

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.config.generation import PoolConfig
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError, ProtocolError
from async_rl.core.types import DropReason, Purpose, Ticket
from async_rl.protocol.buffer import ReadSequences


async def test_a_ticket_has_earlier_responses_if_the_engine_has_drafts(tmp_path: Path) -> None:
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


async def test_tickets_lost_with_a_reply_are_the_same_attempt(service: BufferService) -> None:
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


@pytest.mark.proves("buffer.uniform_groups")
@pytest.mark.parametrize(("choice", "is_replaced"), [("train", False), ("replace", True)])
async def test_a_group_without_a_gradient_is_replaced_and_counted(
    tmp_path: Path, choice: str, is_replaced: bool
) -> None:
    """Without a trained token always, with equal rewards where that is asked for."""
    config = make_config(max_staleness=0, uniform_groups=choice)

    async with opened(tmp_path, config) as service:
        mixed, uniform = await tickets(service, 0)
        await put_passes(service, mixed, [False, True])
        await put(service, uniform)
        assert service.state.drops["no_signal"] == int(is_replaced)
        # The freed place is admitted again, at the same version and for the same batch.
        for ticket in await tickets(service, 0):
            await put_passes(service, ticket, [False, True])
        batch = await taken_ids(service, 0)
        assert batch == ([0, 2] if is_replaced else [0, 1])
        await commit(service, 1, batch)
        first, _ = await tickets(service, 1)
        await put(service, first, trained=False)
        assert service.state.drops["untrainable"] == 1
        assert service.state.queue()["ready"] == 0
        assert len(await tickets(service, 1, held=[first.group_id + 1])) == 1
    assert problems(tmp_path, config) == []


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


async def test_a_run_with_open_groups_is_refused_other_prompts(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await tickets(service, 0)
    with pytest.raises(ProtocolError, match="resume with the data and the seed"):
        async with opened(tmp_path, None, FakePrompts(num_train=2)):
            pass


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


async def fail_all(
    service: BufferService, given: list[Ticket], reason: DropReason = DropReason.SCORING_OUTAGE
) -> None:
    for ticket in given:
        await fail(service, ticket.group_id, ticket.attempt, reason)


async def test_an_outage_uses_up_no_prompt_and_has_growing_pauses(tmp_path: Path) -> None:
    clock = Clock()
    config = make_config(max_attempts=2)
    pauses = []
    async with opened(tmp_path, config, clock=clock) as service:
        await fail_all(service, await tickets(service, 0))
        for _ in range(10):
            started_s = clock.now
            while not (given := await tickets(service, 0)):
                clock.now += 1
            # One group is enough to see whether scoring works again.
            assert [ticket.group_id for ticket in given] == [0]
            assert await tickets(service, 0, generator="generator-1") == []
            pauses.append(clock.now - started_s)
            await fail_all(service, given)
        assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
        assert service.state.drops == {}
    # Its attempts do not count after a restart of the buffer either.
    async with opened(tmp_path, config, clock=clock) as service:
        await fail_all(service, await tickets(service, 0, incarnation="b"))
        clock.now += 30
        [trial] = await tickets(service, 0, incarnation="b")
        await put(service, trial)
        rest = await tickets(service, 0, incarnation="b")
        assert [(t.group_id, t.attempt) for t in rest] == [(1, 3), (2, 3), (3, 3)]
        # The outage is over: what fails now is the prompt's own fault, and counts.
        for attempt in (3, 4):
            assert service.state.drops == {}
            await fail(service, 1, attempt)
            await tickets(service, 0, incarnation="b")
        assert service.state.drops == {"scoring_failed": 1}


async def test_a_prompt_that_no_generator_can_score_is_dropped_in_the_end(tmp_path: Path) -> None:
    """A generator that has scored nothing takes it for an outage, and nothing else may start."""
    clock = Clock()
    config = make_config(groups_per_step=1, max_staleness=0, max_attempts=2)
    async with opened(tmp_path, config, clock=clock) as service:
        started_s = clock.now
        while not service.state.drops:
            await fail_all(service, await tickets(service, 0))
            clock.now += 1
        assert service.state.drops == {"scoring_outage": 1}
        assert 180 < clock.now - started_s < 300
        clock.now += 30
        assert [ticket.group_id for ticket in await tickets(service, 0)] == [1]


async def test_an_attempt_whose_session_nobody_took_does_not_count(tmp_path: Path) -> None:
    config = make_config(max_attempts=2)
    for life in range(2):
        async with opened(tmp_path, config) as service:
            for _ in range(3):
                # No pause: the next program may come at any time.
                given = await tickets(service, 0, incarnation=str(life))
                assert [ticket.group_id for ticket in given] == [0, 1, 2, 3]
                await fail_all(service, given, DropReason.NOT_TAKEN)
            assert service.state.drops == {}
    async with opened(tmp_path, config) as service:
        for _ in range(2):
            given = await tickets(service, 0, incarnation="last")
            await fail_all(service, given, DropReason.AGENT_FAILED)
        assert service.state.drops == {"agent_failed": 4}


BIG, JUDGE = "generator-big-0", "generator-judge-0"


def with_pools(config: RunConfig, **work: Any) -> RunConfig:
    pools = {name: PoolConfig(count=1, work=what) for name, what in work.items()}
    return replace(config, generators=replace(config.generators, pools=pools))


async def purposes(service: BufferService, generator: str, **kinds: Any) -> list[Purpose]:
    return [t.purpose for t in await tickets(service, 0, generator=generator, **kinds)]


async def test_a_pool_for_evaluation_gets_all_of_it_and_no_training_prompt(tmp_path: Path) -> None:
    config = with_pools(make_config(), big="train", judge="evaluation")
    async with opened(tmp_path, config) as service:
        await evaluate(service, 0)
        for name in ("generator-0", BIG):
            assert await purposes(service, name, credit=1) == [Purpose.TRAIN]
        evaluated = await tickets(service, 0, generator=JUDGE, credit=32)
        assert [t.purpose for t in evaluated] == [Purpose.EVAL] * 3
        held = [t.group_id for t in evaluated]
        assert await purposes(service, JUDGE, held=held) == []
        for ticket in evaluated:
            await put(service, ticket, generator=JUDGE)
        assert await service.next_evaluation() == 0


async def test_an_evaluation_that_nobody_takes_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path, with_pools(make_config(), judge="evaluation")) as service:
        await evaluate(service, 0)
        missing = "evaluation of version 0: no generator of generators.judge requests work"
        assert service.waits_for() == missing
        given = await put_all(service)
        assert await taken_ids(service, 0) == given[:2]
        assert service.waits_for() == missing
        assert Purpose.EVAL in await purposes(service, JUDGE, credit=1)
        assert service.waits_for() == "", "it is being written"
        service.lose(JUDGE, "gone", is_spared=True)
        assert service.waits_for() == missing
