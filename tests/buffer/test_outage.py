"""Why generators get no ticket: outages of what scores, which use up no prompt, and pools that are
there for training or for evaluation alone.
"""

import asyncio
from pathlib import Path
from typing import Any

from buffer_support import (
    Clock,
    ask,
    evaluate,
    fail,
    make_config,
    opened,
    put,
    put_all,
    settle,
    taken_ids,
    tickets,
)

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.config.generation import PoolConfig
from async_rl.config.run import RunConfig
from async_rl.core.types import DropReason, Purpose, Ticket
from async_rl.protocol.buffer import TakeBatch, Work


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


async def test_everybody_who_waits_in_an_outage_says_what_fails(service: BufferService) -> None:
    await fail_all(service, await tickets(service, 0))
    parked = asyncio.create_task(service.request_work(ask(0, wait_s=0.05)))
    await settle()
    expected = "every group fails (no verifier answered); one group is tried every 1 s"
    assert service.waits_for() == f"admission: {expected}"
    taken = asyncio.create_task(service.take_batch(TakeBatch(train_version=0, wait_s=0.01)))
    await settle()
    missing = "0 of 2 groups are ready for step 1"
    assert service.waits_for() == f"groups: {missing}; {expected}"
    work = await parked
    assert isinstance(work, Work)
    assert work.waits_for == expected
    await taken


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


async def test_pools_that_train_leave_evaluation_to_the_plain_generators(tmp_path: Path) -> None:
    async with opened(tmp_path, with_pools(make_config(), big="train")) as service:
        await evaluate(service, 0)
        assert await purposes(service, BIG, credit=2) == [Purpose.TRAIN] * 2
        expected = [Purpose.EVAL] * 3 + [Purpose.TRAIN] * 2
        assert await purposes(service, "generator-0") == expected


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


async def test_an_evaluator_with_older_weights_waits_for_newer_ones(tmp_path: Path) -> None:
    async with opened(tmp_path, with_pools(make_config(), judge="evaluation")) as service:
        await evaluate(service, 3)
        early = await service.request_work(ask(2, generator=JUDGE, wait_s=0.01))
        waits_for = "weights of version 3, which is to be evaluated"
        assert early == Work(tickets=[], waits_for=waits_for)
        assert len(await tickets(service, 3, generator=JUDGE)) == 3
        idle = await service.request_work(ask(3, generator=JUDGE, wait_s=0.01, held=[0, 1, 2]))
        assert idle == Work(tickets=[], waits_for="the next evaluation")
