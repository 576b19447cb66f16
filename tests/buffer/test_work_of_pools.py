"""Who is given what where pools of generators are there for training or for evaluation alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from buffer_support import (
    ask,
    commit,
    evaluate,
    make_config,
    opened,
    put,
    put_all,
    settle,
    take,
    taken_ids,
    tickets,
)

from async_rl.buffer.service import BufferService
from async_rl.config.base import replace
from async_rl.config.generation import PoolConfig
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.protocol.buffer import Work

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


@pytest.mark.parametrize("first", [JUDGE, "generator-0"])
async def test_a_parked_evaluator_keeps_no_share_of_the_training_tickets_that_become_free(
    tmp_path: Path, first: str
) -> None:
    config = with_pools(make_config(max_staleness=0), judge="evaluation")
    async with opened(tmp_path, config) as service:
        held = await put_all(service)
        await take(service, 0)
        names = (first, *({JUDGE, "generator-0"} - {first}))
        parked = {
            name: asyncio.create_task(tickets(service, 1, generator=name, wait_s=60))
            for name in names
        }
        await settle()
        await commit(service, 1, held)
        assert [t.purpose for t in await parked["generator-0"]] == [Purpose.TRAIN] * 2
        assert not parked[JUDGE].done()
        assert service.waits_for() == ""
        await evaluate(service, 1)
        assert [t.purpose for t in await parked[JUDGE]] == [Purpose.EVAL] * 3


async def test_an_evaluation_that_nobody_takes_is_told_while_training_goes_on(
    tmp_path: Path,
) -> None:
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


async def test_an_evaluator_with_older_weights_waits_for_those_that_are_to_be_evaluated(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, with_pools(make_config(), judge="evaluation")) as service:
        await evaluate(service, 3)
        early = await service.request_work(ask(2, generator=JUDGE, wait_s=0.01))
        waits_for = "weights of version 3, which is to be evaluated"
        assert early == Work(tickets=[], waits_for=waits_for)
        assert len(await tickets(service, 3, generator=JUDGE)) == 3
        idle = await service.request_work(ask(3, generator=JUDGE, wait_s=0.01, held=[0, 1, 2]))
        assert idle == Work(tickets=[], waits_for="the next evaluation")
