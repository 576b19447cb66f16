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


async def test_a_stage_counts_once_for_all_tasks_and_a_process_waits_while_none_is_busy(
    activity: Activity, clock: Clock
) -> None:
    async def stay(block: contextlib.AbstractContextManager[None], leaving: asyncio.Event) -> None:
        with block:
            await leaving.wait()

    async def enter(block: contextlib.AbstractContextManager[None], seconds: float) -> None:
        leaving.append(asyncio.Event())
        tasks.append(asyncio.create_task(stay(block, leaving[-1])))
        await asyncio.sleep(0)
        clock.pass_by(seconds)

    async def leave(index: int, seconds: float) -> None:
        leaving[index].set()
        await tasks[index]
        clock.pass_by(seconds)

    leaving: list[asyncio.Event] = []
    tasks: list[asyncio.Task[None]] = []
    await enter(activity.waiting("batch"), 3)
    await enter(activity("training"), 5)
    await enter(activity("training"), 2)
    await leave(1, 4)
    assert activity.snapshot()[:2] == ("training", "")
    await leave(2, 1)
    assert activity.snapshot()[:2] == ("waiting", "batch")
    await leave(0, 0)
    counters = activity.snapshot().counters
    assert counters["busy_s/training"] == 11.0
    assert counters["wait_s/batch"] == 15.0, "the task waited all the time"
    assert (counters["wait_s"], counters["busy_s"]) == (4.0, 11.0), "the process not"


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
