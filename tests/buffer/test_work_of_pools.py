"""Who is given what where pools of generators are there for training or for evaluation alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from buffer_support import (
    FakePrompts,
    ask,
    commit,
    evaluate,
    make_config,
    opened,
    put,
    settle,
    take,
    tickets,
)

from async_rl.config.base import replace
from async_rl.config.generation import PoolConfig
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.protocol.buffer import Work

BIG, JUDGE = "generator-big-0", "generator-judge-0"


def with_pools(config: RunConfig, **work: Any) -> RunConfig:
    pools = {name: PoolConfig(count=1, work=what) for name, what in work.items()}
    return replace(config, generators=replace(config.generators, pools=pools))


async def test_a_pool_for_evaluation_gets_all_of_it_and_no_training_prompt(tmp_path: Path) -> None:
    async with opened(
        tmp_path,
        with_pools(make_config(), big="train", judge="evaluation"),
        FakePrompts(num_held_out=4),
    ) as service:
        await evaluate(service, 0)
        assert {
            t.purpose for t in await tickets(service, 0, generator="generator-0", credit=1)
        } == {Purpose.TRAIN}
        assert {t.purpose for t in await tickets(service, 0, generator=BIG, credit=1)} == {
            Purpose.TRAIN
        }
        evaluated = await tickets(service, 0, generator=JUDGE, credit=32)
        assert [t.purpose for t in evaluated] == [Purpose.EVAL] * 4
        assert (
            await tickets(service, 0, generator=JUDGE, held=[t.group_id for t in evaluated]) == []
        )
        for ticket in evaluated:
            await put(service, ticket, generator=JUDGE)
        assert await service.next_evaluation() == 0


async def test_pools_that_train_leave_evaluation_to_the_plain_generators(tmp_path: Path) -> None:
    async with opened(tmp_path, with_pools(make_config(), big="train")) as service:
        await evaluate(service, 0)
        assert {t.purpose for t in await tickets(service, 0, generator=BIG, credit=2)} == {
            Purpose.TRAIN
        }
        given = [t.purpose for t in await tickets(service, 0, generator="generator-0")]
        assert given == [Purpose.EVAL] * 3 + [Purpose.TRAIN] * 2


@pytest.mark.parametrize("first", [JUDGE, "generator-0"])
async def test_a_parked_evaluator_keeps_no_share_of_the_training_tickets_that_become_free(
    tmp_path: Path, first: str
) -> None:
    async with opened(
        tmp_path, with_pools(make_config(max_staleness=0), judge="evaluation")
    ) as service:
        held = [t.group_id for t in await tickets(service, 0)]
        for ticket_id in held:
            ticket = next(
                t
                for t in await tickets(service, 0, held=[i for i in held if i != ticket_id])
                if t.group_id == ticket_id
            )
            await put(service, ticket)
        await take(service, 0)
        names = (first, *({JUDGE, "generator-0"} - {first}))
        parked = {
            name: asyncio.create_task(service.request_work(ask(1, generator=name, wait_s=60)))
            for name in names
        }
        await settle()
        await commit(service, 1, held)
        work = await parked["generator-0"]
        assert isinstance(work, Work)
        assert [t.purpose for t in work.tickets] == [Purpose.TRAIN] * 2
        assert not parked[JUDGE].done()
        assert service.waits_for() == ""
        await evaluate(service, 1)
        evaluation = await parked[JUDGE]
        assert isinstance(evaluation, Work)
        assert [t.purpose for t in evaluation.tickets] == [Purpose.EVAL] * 3


async def test_an_evaluation_that_nobody_takes_is_told_while_training_goes_on(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, with_pools(make_config(), judge="evaluation")) as service:
        await evaluate(service, 0)
        missing = "evaluation of version 0: no generator of generators.judge requests work"
        assert service.waits_for() == missing
        given = await tickets(service, 0)
        assert {t.purpose for t in given} == {Purpose.TRAIN}
        for ticket in given:
            await put(service, ticket)
        assert [g.group_id for g in (await take(service, 0)).groups] == [t.group_id for t in given][
            :2
        ]
        assert service.waits_for() == missing
        evaluated = await tickets(service, 0, generator=JUDGE, credit=1)
        assert service.waits_for() == "", "it is being written"
        service.lose(JUDGE, "gone", is_spared=True)
        assert evaluated
        assert service.waits_for() == missing


async def test_an_evaluator_with_older_weights_waits_for_those_that_are_to_be_evaluated(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, with_pools(make_config(), judge="evaluation")) as service:
        await evaluate(service, 3)
        work = await service.request_work(ask(2, generator=JUDGE, wait_s=0.01))
        assert isinstance(work, Work)
        assert (work.tickets, work.waits_for) == (
            [],
            "weights of version 3, which is to be evaluated",
        )
        assert len(await tickets(service, 3, generator=JUDGE)) == 3
        idle = await service.request_work(ask(3, generator=JUDGE, wait_s=0.01, held=[0, 1, 2]))
        assert isinstance(idle, Work)
        assert idle.waits_for == "the next evaluation"
