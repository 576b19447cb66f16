"""Held-out evaluations as the buffer opens, counts and reports them; its state as people see it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from buffer_support import (
    FakePrompts,
    commit,
    evaluate,
    fail,
    make_config,
    opened,
    put,
    put_all,
    settle,
    step,
    sync,
    take,
    tickets,
    train,
)

from async_rl.buffer.evaluation import report_of
from async_rl.buffer.service import BufferService
from async_rl.buffer.store.store import KEPT_SAMPLES
from async_rl.config.base import replace
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import Purpose
from async_rl.observability.activity import Activity
from async_rl.processes.buffer import report_evaluations, show_state


async def report(
    service: BufferService, prompts: FakePrompts, version: int = 0
) -> tuple[dict[str, float], int]:
    held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(prompts.num_held_out)]
    reader = service.store.reader
    return await report_of(reader, version, held_out, decode=str, extraction="auto")


async def test_an_evaluation_is_reported_from_the_store_when_its_last_sample_is_in(
    tmp_path: Path,
) -> None:
    prompts = FakePrompts(num_held_out=4)
    config = make_config(max_attempts=1)
    async with opened(tmp_path, config, prompts) as service:
        for _ in range(2):
            await evaluate(service, 0)
        given = await tickets(service, 0, credit=2)
        assert [(t.purpose, t.num_samples) for t in given] == [(Purpose.EVAL, 1)] * 4
        assert service.state.queue()["generating"] == 0
        await put(service, given[1], passes=False, is_truncated=True)
        await fail(service, given[2].group_id, 1)
    async with opened(tmp_path, config, prompts) as service:
        await put(service, given[3], versions=[0] * 5)
        assert not service.state.evaluations.finished
        await put(service, given[0])
        assert service.state.evaluations.finished.popleft() == 0
        scalars, num_failed = await report(service, prompts)
        means = ("pass_at_1", "pass_at_k", "maj_at_k", "reward_mean")
        error = pytest.approx(1.96 * (1 / 3) ** 0.5 / 3**0.5)
        assert scalars == {
            **{f"eval/{name}": pytest.approx(2 / 3) for name in means},
            **{f"eval/{name}_error": error for name in means},
            "eval/version_mean": 0.0,
            "eval/num_samples": 3.0,
            "eval/length_mean": pytest.approx(11 / 3),
            "eval/truncated_share": pytest.approx(1 / 3),
        }
        assert num_failed == 1
    async with opened(tmp_path, config, prompts) as service:
        assert service.state.evaluations.finished.popleft() == 0


async def test_an_evaluation_draws_so_many_samples_of_each_prompt_as_are_asked_for(
    tmp_path: Path,
) -> None:
    prompts = FakePrompts(num_held_out=2)
    config = make_config()
    config = replace(config, evaluation=replace(config.evaluation, num_samples=3))
    async with opened(tmp_path, config, prompts) as service:
        await evaluate(service, 0)
        given = [t for t in await tickets(service, 0, credit=4) if t.purpose is Purpose.EVAL]
        assert [t.num_samples for t in given] == [3, 3]
        await put(service, given[0])
        await put(service, given[1], passes=False)
        scalars, _ = await report(service, prompts)
        assert scalars["eval/num_samples"] == 6
        assert scalars["eval/pass_at_1"] == scalars["eval/pass_at_k"] == 0.5


async def test_a_learner_restored_to_an_evaluated_version_gets_its_result_again(
    tmp_path: Path,
) -> None:
    prompts = FakePrompts(num_held_out=KEPT_SAMPLES + 2)
    async with opened(tmp_path, prompts=prompts) as service:
        await evaluate(service, 0)
        for ticket in await tickets(service, 0, credit=20):
            if ticket.purpose is Purpose.EVAL:
                await put(service, ticket)
        assert service.state.evaluations.finished.popleft() == 0
        figures = {"eval/num_samples": 18.0, "eval/pass_at_1": 0.25}
        service.store.finish_evaluation(0, figures)
        await service.store.flush()
        await evaluate(service, 0)
        assert service.state.evaluations.finished.popleft() == 0
        assert (await report(service, prompts))[0] == figures
        with pytest.raises(InfrastructureError, match="no longer contains the trajectories"):
            await service.store.reader.groups([KEPT_SAMPLES])
        assert len(await service.store.reader.groups([KEPT_SAMPLES - 1])) == 1


async def test_a_finished_evaluation_of_an_undone_version_can_be_made_again(tmp_path: Path) -> None:
    async with opened(tmp_path, prompts=FakePrompts(num_held_out=1)) as service:
        await evaluate(service, 0)
        await put_all(service)
        await take(service, 0)
        await commit(service, 1, [1, 2])
        for life in ("second", "third"):
            await evaluate(service, 1)
            ticket, *_ = await tickets(service, 1, credit=1)
            assert ticket.purpose is Purpose.EVAL
            await put(service, ticket)
            assert 1 in service.state.evaluations.finished
            await sync(service, 0, life)
            assert 1 not in service.state.evaluations.finished
            await take(service, 0)
            await commit(service, 1, [1, 2])
        # That of the version to which it went back has its group.
        assert await service.store.reader.evaluation_groups(0) == [(0, True)]
    async with opened(tmp_path / "none", prompts=FakePrompts(num_held_out=0)) as service:
        await evaluate(service, 0)
        assert {t.purpose for t in await tickets(service, 0)} == {Purpose.TRAIN}


class Surroundings:
    """The part of a ProcessContext that the buffer's tasks need."""

    def __init__(self) -> None:
        self.config = make_config()
        self.activity = Activity()
        self.log = logging.getLogger("test")
        self.version = -1


async def test_figures_of_discarded_weights_are_not_booked_on_those_after_them(
    tmp_path: Path,
) -> None:
    prompts = FakePrompts(num_held_out=2)
    async with opened(tmp_path, prompts=prompts) as service:
        await step(service, 0)
        has_returned = asyncio.Event()

        async def goes_back(step: int, **_: Any) -> None:
            """While the figures travel, the learner starts again and comes to the version."""
            await sync(service, 0, "second")
            await train(service, 0)
            await evaluate(service, 1)
            has_returned.set()

        context: Any = Surroundings()
        context.report = goes_back
        held_out = [prompts.prompt(Purpose.EVAL, i) for i in range(2)]
        task = asyncio.create_task(report_evaluations(context, service, held_out, str))
        await evaluate(service, 1)
        for ticket in await tickets(service, 1, credit=2):
            await put(service, ticket)
        await has_returned.wait()
        await settle()
        await service.store.flush()
        # Its groups are open: it has begun again.
        assert await service.store.reader.evaluation_scores() == {}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_status_tells_queue_depths_drops_and_what_the_learner_waits_for(
    service: BufferService,
) -> None:
    context: Any = Surroundings()
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
