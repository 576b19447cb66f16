"""Activity against hand-computed seconds, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from async_rl.observability.activity import Activity


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock=clock, wall=lambda: clock() + 1000.0)


def test_seconds_of_a_stage_count_while_it_is_open_and_after(
    activity: Activity, clock: Clock
) -> None:
    clock.pass_by(1)
    with contextlib.suppress(RuntimeError), activity("training"):
        clock.pass_by(2)
        snapshot = activity.snapshot()
        assert (snapshot.state, snapshot.waits_for, snapshot.since_s) == ("training", "", 1101.0)
        busy = {"busy_s/training": 2.0, "busy_s": 2.0}
        assert snapshot.counters == busy | {"wait_s": 0.0, "blocked_s": 0.0, "idle_s": 1.0}
        raise RuntimeError
    clock.pass_by(4)
    for count, value in ((3, 10.0), (4, 7.0)):
        activity.count("tokens", count)
        activity.gauge("memory_mb", value)
    snapshot = activity.snapshot()
    assert (snapshot.counters["tokens"], snapshot.counters["gauge/memory_mb"]) == (7.0, 7.0)
    assert (snapshot.state, snapshot.since_s) == ("starting", 1103.0)
    assert snapshot.counters["busy_s/training"] == 2.0
    assert snapshot.counters["idle_s"] == 5.0
    activity.rest("serving")
    clock.pass_by(1)
    assert activity.snapshot()[:3] == ("serving", "", 1107.0)


def test_an_inner_wait_suspends_the_stage_around_it(activity: Activity, clock: Clock) -> None:
    with activity("scoring"):
        clock.pass_by(1)
        with activity.waiting("verifier: 3 ahead"):
            clock.pass_by(10)
            assert activity.snapshot()[:2] == ("waiting", "verifier: 3 ahead")
        clock.pass_by(2)
    counters = activity.snapshot().counters
    assert counters["busy_s/scoring"] == counters["busy_s"] == 3.0
    assert counters["wait_s/verifier"] == counters["wait_s"] == 10.0


class Task:
    """A task inside a block, until it is told to leave."""

    def __init__(self, block: contextlib.AbstractContextManager[None]) -> None:
        self.entered, self.leaving = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self.stay(block))

    async def stay(self, block: contextlib.AbstractContextManager[None]) -> None:
        with block:
            self.entered.set()
            await self.leaving.wait()

    async def enter(self) -> Task:
        await self.entered.wait()
        return self

    async def leave(self) -> None:
        self.leaving.set()
        await self.task


async def test_two_tasks_in_a_stage_count_its_seconds_once(
    activity: Activity, clock: Clock
) -> None:
    first = await Task(activity("generating")).enter()
    clock.pass_by(1)
    second = await Task(activity("generating")).enter()
    clock.pass_by(2)
    await first.leave()
    clock.pass_by(4)
    await second.leave()
    assert activity.snapshot().counters["busy_s/generating"] == 7.0


async def test_a_process_waits_only_while_no_task_is_busy(activity: Activity, clock: Clock) -> None:
    waiter = await Task(activity.waiting("batch")).enter()
    clock.pass_by(3)
    worker = await Task(activity("training")).enter()
    clock.pass_by(5)
    assert activity.snapshot()[:2] == ("training", "")
    await worker.leave()
    clock.pass_by(1)
    assert activity.snapshot()[:2] == ("waiting", "batch")
    await waiter.leave()
    counters = activity.snapshot().counters
    assert counters["wait_s/batch"] == 9.0, "the task waited all the time"
    assert (counters["wait_s"], counters["busy_s"]) == (4.0, 5.0), "the process not"


async def test_a_block_in_a_thread_suspends_its_caller_s(activity: Activity, clock: Clock) -> None:
    def work() -> None:
        with activity("forward"):
            clock.pass_by(2)

    with activity("training"):
        clock.pass_by(1)
        await asyncio.to_thread(work)
        clock.pass_by(1)
    counters = activity.snapshot().counters
    assert (counters["busy_s/training"], counters["busy_s/forward"]) == (2.0, 2.0)
    assert counters["busy_s"] == 4.0


def test_work_that_is_held_back_counts_as_that_in_every_task_and_as_work_again_afterwards(
    activity: Activity, clock: Clock
) -> None:
    with activity("generating"):
        clock.pass_by(1)
        with activity.held_back("generating", by="it rests: the learner has the device"):
            clock.pass_by(2)
            assert activity.snapshot()[:2] == ("blocked", "it rests: the learner has the device")
            with activity("loading"):  # other work goes on, and suspends the stage as ever
                clock.pass_by(4)
            with activity("generating"):
                clock.pass_by(8)
        clock.pass_by(16)
        assert activity.snapshot()[:2] == ("generating", "")
    counters = activity.snapshot().counters
    assert (counters["busy_s/generating"], counters["blocked_s/it rests"]) == (17.0, 10.0)
    assert counters["busy_s/loading"] == 4.0
    assert (counters["busy_s"], counters["blocked_s"]) == (21.0, 10.0)
