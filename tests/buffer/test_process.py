"""The buffer's own tasks, with a directory and a reporter that are not there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
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

from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose
from async_rl.observability.activity import Activity
from async_rl.processes.buffer import report_evaluations, show_state
from async_rl.protocol.learner import TakeBatch
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
async def working(tmp_path: Path, **kinds: Any) -> AsyncIterator[SimpleNamespace]:
    prompts = FakePrompts(num_held_out=2)
    config = make_config(**kinds)
    async with opened(tmp_path, config, prompts) as service:
        yield SimpleNamespace(service=service, context=Surroundings(config), prompts=prompts)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_finished_evaluation_is_reported_once_as_metrics_of_its_step(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as it:
        held_out = [it.prompts.prompt(Purpose.EVAL, i) for i in range(2)]
        task = asyncio.create_task(report_evaluations(it.context, it.service, held_out, str))
        await evaluate(it.service, 0)
        for ticket in await tickets(it.service, 0, credit=1):
            await put(it.service, ticket)
        step, scalars = await it.context.reports.get()
        assert (step, scalars["eval/pass_at_1"], scalars["eval/num_samples"]) == (0, 1.0, 2.0)
        await it.service.store.flush()
        await ended(task)
    async with working(tmp_path) as it:
        assert not it.service.state.evaluations.finished


async def test_figures_of_discarded_weights_are_not_booked_on_those_after_them(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as it:
        service = it.service
        await step(service, 0)

        has_returned = asyncio.Event()

        async def goes_back(step: int, **_: Any) -> None:
            """While the figures travel, the learner starts again and comes to the version."""
            await sync(service, 0, "second")
            await train(service, 0)
            await evaluate(service, 1)
            has_returned.set()

        it.context.report = goes_back
        held_out = [it.prompts.prompt(Purpose.EVAL, i) for i in range(2)]
        task = asyncio.create_task(report_evaluations(it.context, it.service, held_out, str))
        await evaluate(service, 1)
        for ticket in await tickets(service, 1, credit=2):
            await put(service, ticket)
        await has_returned.wait()
        await settle()
        await service.store.flush()
        # Its groups are open: it has begun again.
        assert await service.store.reader.evaluation_scores() == {}
        await ended(task)


async def test_status_tells_queue_depths_drops_and_what_the_learner_waits_for(
    tmp_path: Path,
) -> None:
    async with working(tmp_path) as it:
        task = asyncio.create_task(show_state(it.context, it.service))
        given = await tickets(it.service, 0)
        parked = asyncio.create_task(it.service.take_batch(TakeBatch(train_version=0, wait_s=60)))
        await put(it.service, given[0])
        await put(it.service, given[1], trained=False)
        shown = it.context.activity.snapshot()
        assert (shown.state, shown.waits_for) == (
            "waiting",
            "groups: 1 of 2 groups are ready for step 1",
        )
        assert {
            name: shown.counters[f"gauge/queue/{name}"] for name in ("generating", "ready")
        } == {"generating": 2, "ready": 1}
        assert shown.counters["failures/untrainable"] == 1
        await put(it.service, given[2])
        await parked
        await take(it.service, 0)
        assert it.context.activity.snapshot().waits_for == ""
        await ended(task)
