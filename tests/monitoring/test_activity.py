"""Activity against hand-computed seconds, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from async_rl.observability.activity import Activity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

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


def test_seconds_of_one_stage_are_counted_while_it_is_open_and_after(
    activity: Activity, clock: Clock
) -> None:
    clock.pass_by(1)
    with activity("training"):
        clock.pass_by(2)
        snapshot = activity.snapshot()
        assert (snapshot.state, snapshot.waits_for, snapshot.since_s) == ("training", "", 1101.0)
        assert snapshot.counters == {
            "busy_s/training": 2.0,
            "busy_s": 2.0,
            "wait_s": 0.0,
            "blocked_s": 0.0,
            "idle_s": 1.0,
        }
    clock.pass_by(4)
    snapshot = activity.snapshot()
    assert (snapshot.state, snapshot.since_s) == ("starting", 1103.0)
    assert snapshot.counters["busy_s/training"] == 2.0
    assert snapshot.counters["idle_s"] == 5.0


def test_an_inner_wait_suspends_the_stage_around_it(activity: Activity, clock: Clock) -> None:
    with activity("scoring"):
        clock.pass_by(1)
        with activity.waiting("verifier: 3 ahead"):
            clock.pass_by(10)
            assert activity.snapshot()[:2] == ("waiting", "verifier: 3 ahead")
        clock.pass_by(2)
    counters = activity.snapshot().counters
    assert counters["busy_s/scoring"] == 3.0
    assert counters["wait_s/verifier"] == 10.0
    assert (counters["busy_s"], counters["wait_s"]) == (3.0, 10.0)


async def _stay(
    block: contextlib.AbstractContextManager[None], entered: asyncio.Event, leave: asyncio.Event
) -> None:
    with block:
        entered.set()
        await leave.wait()


async def test_two_tasks_in_one_stage_count_its_seconds_once(
    activity: Activity, clock: Clock
) -> None:
    first, second, leave_first, leave_second = (asyncio.Event() for _ in range(4))
    a = asyncio.create_task(_stay(activity("generating"), first, leave_first))
    await first.wait()
    clock.pass_by(1)
    b = asyncio.create_task(_stay(activity("generating"), second, leave_second))
    await second.wait()
    clock.pass_by(2)
    leave_first.set()
    await a
    clock.pass_by(4)
    leave_second.set()
    await b
    assert activity.snapshot().counters["busy_s/generating"] == 7.0


async def test_a_process_waits_only_while_none_of_its_tasks_is_busy(
    activity: Activity, clock: Clock
) -> None:
    waits, works, got, done = (asyncio.Event() for _ in range(4))
    waiter = asyncio.create_task(_stay(activity.waiting("batch"), waits, got))
    await waits.wait()
    clock.pass_by(3)
    worker = asyncio.create_task(_stay(activity("training"), works, done))
    await works.wait()
    clock.pass_by(5)
    assert activity.snapshot()[:2] == ("training", "")
    done.set()
    await worker
    clock.pass_by(1)
    assert activity.snapshot()[:2] == ("waiting", "batch")
    got.set()
    await waiter
    counters = activity.snapshot().counters
    assert counters["wait_s/batch"] == 9.0, "the task waited all the time"
    assert (counters["wait_s"], counters["busy_s"]) == (
        4.0,
        5.0,
    ), "the process only when nothing else was done"


async def test_a_task_started_inside_a_block_does_not_suspend_it(
    activity: Activity, clock: Clock
) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    with activity("training"):
        child = asyncio.create_task(_stay(activity.waiting("next batch"), entered, leave))
        await entered.wait()
        clock.pass_by(2)
        assert activity.snapshot().state == "training"
    leave.set()
    await child
    assert activity.snapshot().counters["busy_s/training"] == 2.0


async def test_a_block_in_a_thread_suspends_the_block_that_handed_it_the_work(
    activity: Activity, clock: Clock
) -> None:
    def work() -> None:
        with activity("forward"):
            clock.pass_by(2)

    with activity("training"):
        clock.pass_by(1)
        await asyncio.to_thread(work)
        clock.pass_by(1)
    counters = activity.snapshot().counters
    assert (counters["busy_s/training"], counters["busy_s/forward"], counters["busy_s"]) == (
        2.0,
        2.0,
        4.0,
    )


def test_a_block_left_by_an_exception_is_closed(activity: Activity, clock: Clock) -> None:
    with contextlib.suppress(RuntimeError), activity("loading"):
        clock.pass_by(1)
        raise RuntimeError
    clock.pass_by(1)
    assert activity.snapshot().counters["busy_s/loading"] == 1.0


async def test_an_async_generator_closed_from_another_task_leaves_no_block_open(
    activity: Activity, clock: Clock
) -> None:
    async def numbers():  # type: ignore[no-untyped-def]
        with activity("generating"):
            yield 1

    stream = numbers()
    await asyncio.create_task(stream.__anext__())
    clock.pass_by(1)
    await asyncio.create_task(stream.aclose())
    clock.pass_by(5)
    assert activity.snapshot().counters["busy_s/generating"] == 1.0


def test_counts_add_up_and_gauges_replace(activity: Activity) -> None:
    activity.count("tokens_generated", 3)
    activity.count("tokens_generated", 4)
    activity.gauge("memory_mb", 10.0)
    activity.gauge("memory_mb", 7.0)
    counters = activity.snapshot().counters
    assert (counters["tokens_generated"], counters["gauge/memory_mb"]) == (7.0, 7.0)


def test_the_resting_state_is_what_the_process_names_it(activity: Activity, clock: Clock) -> None:
    clock.pass_by(2)
    activity.rest("serving")
    clock.pass_by(1)
    assert activity.snapshot()[:3] == ("serving", "", 1102.0)


async def test_an_upstream_wait_is_shown_first_and_a_wait_with_a_reason_before_one_without(
    activity: Activity, clock: Clock
) -> None:
    got = asyncio.Event()
    shown = []
    async with asyncio.TaskGroup() as group:
        for block in (
            activity.blocked("admission: 8 of 8"),
            activity.waiting("verdicts"),
            activity.waiting("verdicts: it is full"),
        ):
            entered = asyncio.Event()
            group.create_task(_stay(block, entered, got))
            await entered.wait()
            shown.append(activity.snapshot()[:2])
        got.set()
    assert shown == [
        ("blocked", "admission: 8 of 8"),
        ("waiting", "verdicts"),
        ("waiting", "verdicts: it is full"),
    ]


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
    assert (
        counters["busy_s/generating"],
        counters["blocked_s/it rests"],
        counters["busy_s/loading"],
    ) == (17.0, 10.0, 4.0)
    assert (counters["busy_s"], counters["blocked_s"]) == (21.0, 10.0)
