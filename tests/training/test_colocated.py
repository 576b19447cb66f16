"""Handovers of a shared device as learner and generators take them, with real pushes."""

import asyncio
from pathlib import Path
from typing import Any

from pushing_support import Learner

from async_rl.core.errors import DeadlineExceeded, WeightsError
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message
from async_rl.protocol.generator import LoadReport, LoadWeights, Sleep
from async_rl.protocol.weights import Manifest
from async_rl.rollouts.sleeping import Sleeping

COLOCATED = "placement=colocated"


class Generator:
    """The part of a generator process that sleeps and wakes, and the engine inside, which writes
    nothing. did: the engine. heard: the process.
    """

    def __init__(self, fails_with: Exception | None = None) -> None:
        self.activity = Activity()
        self.sleeping = Sleeping(self.open, self.activity)
        self.did: list[str] = []
        self.heard: list[str] = []
        self._fails_with = fails_with

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        is_load = isinstance(request, LoadWeights)
        self.heard.append(type(request.source if is_load else request).__name__)
        if self._fails_with is not None:
            raise self._fails_with
        if isinstance(request, Sleep):
            return await self.sleeping.sleep(request)
        assert isinstance(request, LoadWeights)
        async with self.sleeping.waking(request.handover) as engine:
            return await engine.load_weights(request.manifest)

    async def open(self) -> Any:
        self.did.append("start")
        return self

    async def sleep(self) -> None:
        self.did.append("sleep")

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        self.did.append(f"load {manifest.version}")
        return LoadReport(version=manifest.version, pause_s=0.1)


async def test_an_engine_starts_with_the_first_push_and_sleeps_at_every_handover(
    tmp_path: Path,
) -> None:
    """Another generator joins during a handover, and is left alone until it ends."""
    early, late = Generator(), Generator()
    learner = Learner(tmp_path, {"early": early, "late": late}, COLOCATED)

    async with learner.running(*(each.sleeping.start_when_called for each in (early, late))):
        learner.directory.revision = -1  # as after the start
        taking = asyncio.create_task(learner.pusher.take_device())
        await asyncio.to_thread(lambda: None)
        assert learner.moves == [], "its generators are not known yet"
        learner.serve("early")
        await taking
        assert early.did == []
        await learner.push(0)
        assert early.did == ["start", "load 0"]
        await learner.pusher.take_device()
        await learner.pusher.take_device()  # it has it already
        learner.serve("early", "late")
        await asyncio.to_thread(lambda: None)
        assert late.did == []
        await learner.push(1)
    assert early.did == ["start", "load 0", "sleep", "load 1"]
    assert late.did == ["start", "load 1"]
    assert learner.moves == ["enter", "leave"] * 2


async def test_who_does_not_sleep_is_cut_off_and_the_learner_has_the_device(tmp_path: Path) -> None:
    generators = {
        "good": Generator(),
        "hangs": Generator(DeadlineExceeded("it hangs")),
        "breaks": Generator(WeightsError("no")),
    }
    learner = Learner(tmp_path, generators, COLOCATED, "timeouts.start_s=42")

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


async def test_time_asleep_counts_for_no_limit() -> None:
    loop = asyncio.get_running_loop()
    generator = Generator()
    await generator.sleeping.start()
    async with generator.sleeping.limit(3600):
        [limit] = generator.sleeping.limits
        limit.reschedule(loop.time() + 50)
        await generator.sleeping.sleep(Sleep(handover=1))
        is_stopped = limit.when() is None
        async with generator.sleeping.waking(1):
            pass
        when_s = limit.when()
        assert when_s is not None
        goes_on = 0 < when_s - loop.time() <= 50
    assert (is_stopped, goes_on) == (True, True)
