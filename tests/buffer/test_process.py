"""The buffer's own tasks, with a directory and a reporter that are not there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from buffer_support import (
    FakePrompts,
    evaluate,
    make_config,
    opened,
    put,
    settle,
    step,
    sync,
    take,
    tickets,
    train,
)

from async_rl.buffer.service import BufferService
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.observability.activity import Activity
from async_rl.processes.buffer import report_evaluations, show_state
from async_rl.runtime.directory import Directory


class Surroundings:
    """The part of a ProcessContext that the buffer's tasks need; it keeps the reports."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.directory = Directory()
        self.activity = Activity()
        self.log = logging.getLogger("test")
        self.version = -1
        self.reports: asyncio.Queue[tuple[int, dict[str, float]]] = asyncio.Queue()

    async def report(self, step: int, *, scalars: dict[str, float]) -> None:
        await self.reports.put((step, scalars))


@asynccontextmanager
async def working(tmp_path: Path) -> AsyncIterator[tuple[BufferService, Any]]:
    config = make_config()
    async with opened(tmp_path, config, FakePrompts(num_held_out=2)) as service:
        yield service, Surroundings(config)


@asynccontextmanager
async def reporting(service: BufferService, context: Any) -> AsyncIterator[None]:
    held_out = [FakePrompts().prompt(Purpose.EVAL, i) for i in range(2)]
    task = asyncio.create_task(report_evaluations(context, service, held_out, str))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_finished_evaluation_is_reported_once_as_metrics_of_its_step(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as (service, context), reporting(service, context):
        await evaluate(service, 0)
        for ticket in await tickets(service, 0, credit=1):
            await put(service, ticket)
        step, scalars = await context.reports.get()
        assert (step, scalars["eval/pass_at_1"], scalars["eval/num_samples"]) == (0, 1.0, 2.0)
        await service.store.flush()
    async with working(tmp_path) as (service, _):
        assert not service.state.evaluations.finished


async def test_figures_of_discarded_weights_are_not_booked_on_those_after_them(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as (service, context):
        await step(service, 0)
        has_returned = asyncio.Event()

        async def goes_back(step: int, **_: Any) -> None:
            """While the figures travel, the learner starts again and comes to the version."""
            await sync(service, 0, "second")
            await train(service, 0)
            await evaluate(service, 1)
            has_returned.set()

        context.report = goes_back
        async with reporting(service, context):
            await evaluate(service, 1)
            for ticket in await tickets(service, 1, credit=2):
                await put(service, ticket)
            await has_returned.wait()
            await settle()
            await service.store.flush()
        # Its groups are open: it has begun again.
        assert await service.store.reader.evaluation_scores() == {}


async def test_status_tells_queue_depths_drops_and_what_the_learner_waits_for(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as (service, context):
        task = asyncio.create_task(show_state(context, service))
        given = await tickets(service, 0)
        parked = asyncio.create_task(take(service, 0, wait_s=60))
        await put(service, given[0])
        await put(service, given[1], trained=False)
        shown = context.activity.snapshot()
        assert shown.state == "waiting"
        assert shown.waits_for == "groups: 1 of 2 groups are ready for step 1"
        counters = {"gauge/queue/generating": 2, "gauge/queue/ready": 1, "failures/untrainable": 1}
        assert shown.counters.items() >= counters.items()
        await put(service, given[2])
        await parked
        await take(service, 0)
        assert context.activity.snapshot().waits_for == ""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
