"""Handovers of a shared device that fail; tests/e2e/test_own_run.py has those that succeed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pushing_support import Learner

from async_rl.core.errors import DeadlineExceeded, WeightsError
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Ok
from async_rl.protocol.generator import Sleep
from async_rl.rollouts.turns import Sleeping


class Generator:
    """Goes to sleep, or fails."""

    def __init__(self, fails_with: Exception | None = None) -> None:
        self._fails_with = fails_with

    async def call(self, request: Sleep, *, timeout_s: float) -> Ok:
        if self._fails_with is not None:
            raise self._fails_with
        return Ok()


async def test_who_does_not_sleep_is_cut_off_and_the_learner_has_the_device(tmp_path: Path) -> None:
    generators = {
        "good": Generator(),
        "hangs": Generator(DeadlineExceeded("it hangs")),
        "breaks": Generator(WeightsError("no")),
    }
    learner = Learner(tmp_path, generators, "placement=colocated", "timeouts.start_s=42")

    async with learner.running():
        learner.serve(*generators)
        await learner.pusher.take_device()
        assert learner.device.is_learners
    # Not heard of before, so it may have been starting: 42 s more (timeouts.start_s).
    late = "it did not go to sleep within 49 s (timeouts.start_s / 6)"
    assert {e.name: e.reason for e in learner.cut_off} == {
        "hangs": f"{late}: DeadlineExceeded: it hangs",
        "breaks": f"{late}: WeightsError: no",
    }


async def open_engine() -> Any:
    async def sleep() -> None:
        pass

    return SimpleNamespace(sleep=sleep)


async def test_time_asleep_counts_for_no_limit() -> None:
    loop = asyncio.get_running_loop()
    sleeping = Sleeping(open_engine, Activity())
    await sleeping.start()
    async with sleeping.limit(3600):
        [limit] = sleeping.limits
        limit.reschedule(loop.time() + 50)
        await sleeping.sleep(Sleep(handover=1))
        is_stopped = limit.when() is None
        async with sleeping.waking(1):
            pass
        when_s = limit.when()
        assert when_s is not None
        goes_on = 0 < when_s - loop.time() <= 50
    assert (is_stopped, goes_on) == (True, True)
