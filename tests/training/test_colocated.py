"""Handovers of a shared device as learner and generators take them, with real pushes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import compose

from async_rl.core.errors import DeadlineExceeded, WeightsError
from async_rl.generation.engine import Engine, OpenEngine
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message
from async_rl.protocol.generator import LoadReport, LoadWeights, Sleep
from async_rl.protocol.membership import Expel, Member, Members
from async_rl.protocol.weights import DeviceBlock, Manifest
from async_rl.rollouts.sleeping import Sleeping
from async_rl.runtime.directory import Directory
from async_rl.training.device import Device, SharedDevice
from async_rl.training.operations import EnterDevice, LeaveDevice, Operation
from async_rl.training.pushing import Pusher
from async_rl.weights.block import SharedTensors
from async_rl.weights.tensors import tensor_spec

SHARED_GPU = ("learner.gpus_each=0.5", "generators.gpus_each=0.5")
BLOCK = DeviceBlock(gpu="GPU-1", chunks=[])


class Generator:
    """The part of a generator process that sleeps and wakes, around an engine."""

    def __init__(self, open_engine: OpenEngine) -> None:
        self.activity = Activity()
        self.sleeping = Sleeping(open_engine, self.activity)
        self.heard: list[str] = []
        self.fails_with: Exception | None = None

    async def call(self, request: Message, *, timeout_s: float) -> Message:
        is_load = isinstance(request, LoadWeights)
        self.heard.append(type(request.source if is_load else request).__name__)
        if self.fails_with is not None:
            raise self.fails_with
        if isinstance(request, Sleep):
            return await self.sleeping.sleep(request)
        assert isinstance(request, LoadWeights)
        async with self.sleeping.waking(request.handover) as engine:
            return await engine.load_weights(request.manifest)


class World:
    """A pusher with its directory, its supervisor and its ranks; generators join by name."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        config = compose(
            "grpo_code", ["placement=colocated", "weights.probe_every_pushes=0", *overrides]
        )
        self.directory = Directory()
        self.generators: dict[str, Generator] = {}
        self.moves: list[str] = []
        self.has_unshared = asyncio.Event()
        self.others: list[Any] = []
        self.cut_off: list[Expel] = []
        self._publisher = SharedTensors([tensor_spec("embed", torch.empty(5))])
        context: Any = SimpleNamespace(
            config=config,
            run_dir=run_dir,
            activity=Activity(),
            directory=self.directory,
            supervisor=self,
            incarnation="one",
            host="127.0.0.1",
            incarnation_of=lambda member: self.generators[member.name],
        )
        self.device = SharedDevice(context) if context.config.takes_turns else Device()
        pool: Any = self
        self.pusher = Pusher(context, pool, self.device, rank_device=torch.device("cpu"), life=1)
        self.serve()

    def serve(self) -> None:
        members = [
            Member(name=n, role="generator", pid=1, address="a", state="", since_s=0)
            for n in self.generators
        ]
        self.directory.update(Members(revision=self.directory.revision + 1, members=members))

    def join(self, name: str, generator: Generator) -> None:
        self.generators[name] = generator
        self.serve()

    async def call(self, request: Expel) -> None:
        """The supervisor ends whom the learner cuts off."""
        self.cut_off.append(request)
        del self.generators[request.name]
        self.serve()

    async def publish(self, version: int, *, compares: bool) -> Manifest:
        return self._publisher.write(version, [torch.zeros(5)])

    async def share_on_device(self) -> DeviceBlock:
        self.moves.append("share")
        return BLOCK

    async def unshare_on_device(self) -> None:
        self.moves.append("unshare")
        self.has_unshared.set()

    async def lead(self, operation: Operation) -> list[Any]:
        moves = {EnterDevice: "enter", LeaveDevice: "leave"}
        if type(operation) in moves:
            self.moves.append(moves[type(operation)])
        return []


class Still:
    """An engine that writes nothing."""

    def __init__(self) -> None:
        self.did: list[str] = []

    async def open(self) -> Engine:
        self.did.append("start")
        return self  # type: ignore[return-value]

    async def sleep(self) -> None:
        self.did.append("sleep")

    async def load_weights(self, manifest: Manifest) -> LoadReport:
        self.did.append(f"load {manifest.version}")
        return LoadReport(version=manifest.version, pause_s=0.1)


@asynccontextmanager
async def pushing(world: World) -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        task = group.create_task(world.pusher.run())
        yield group
        task.cancel()


def run(story: Awaitable[None]) -> None:
    asyncio.run(story)  # type: ignore[arg-type]


def test_an_engine_starts_with_the_first_push_and_sleeps_at_every_handover(tmp_path: Path) -> None:
    world, engine = World(tmp_path), Still()

    async def story() -> None:
        generator = Generator(engine.open)
        async with pushing(world) as group:
            group.create_task(generator.sleeping.start_when_called())
            world.join("a", generator)
            await world.pusher.take_device()
            assert engine.did == []
            await world.pusher.publish(0)
            await world.pusher.live(0)
            assert engine.did == ["start", "load 0"]
            await world.pusher.take_device()
            await world.pusher.take_device()  # it has it already
            await world.pusher.publish(1)
            await world.pusher.live(1)

    run(story())
    assert engine.did == ["start", "load 0", "sleep", "load 1"]
    assert world.moves == ["enter", "leave"] * 2


def test_the_device_is_not_taken_before_its_generators_are_known(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def story() -> None:
        world.directory.revision = -1  # as after the start
        async with pushing(world):
            taking = asyncio.create_task(world.pusher.take_device())
            await asyncio.to_thread(lambda: None)
            assert world.moves == []
            world.serve()
            await taking

    run(story())
    assert world.moves == ["enter"]


def test_a_generator_that_joins_during_a_handover_is_left_alone_until_it_ends(
    tmp_path: Path,
) -> None:
    world, early, late = World(tmp_path), Still(), Still()

    async def story() -> None:
        generators = [Generator(early.open), Generator(late.open)]
        async with pushing(world) as group:
            for generator in generators:
                group.create_task(generator.sleeping.start_when_called())
            world.join("early", generators[0])
            await world.pusher.take_device()
            world.join("late", generators[1])
            await asyncio.to_thread(lambda: None)
            assert late.did == []
            await world.pusher.publish(3)
            await world.pusher.live(3)

    run(story())
    assert early.did == late.did == ["start", "load 3"]


def test_memory_of_the_gpu_is_shared_until_all_have_read_it_and_who_comes_later_reads_the_block(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, *SHARED_GPU, "weights.transfer=ipc")

    async def story() -> None:
        first, late = Generator(Still().open), Generator(Still().open)
        async with pushing(world):
            for generator in (first, late):
                await generator.sleeping.start()
            world.join("first", first)
            await world.pusher.take_device()
            await world.pusher.publish(0)
            await world.has_unshared.wait()
            world.has_unshared.clear()
            assert world.moves == ["enter", "share", "leave", "unshare"]
            world.join("late", late)
            while "SharedBlock" not in late.heard:
                await asyncio.to_thread(lambda: None)
            await world.pusher.take_device()
            await world.pusher.publish(1)
            await world.has_unshared.wait()
        assert first.heard == ["Sleep", "DeviceBlock", "Sleep", "DeviceBlock"]
        assert late.heard == ["SharedBlock", "Sleep", "DeviceBlock"]

    run(story())
    assert world.moves == ["enter", "share", "leave", "unshare"] * 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*SHARED_GPU, "weights.transfer=ipc"], "DeviceBlock"),
        ([*SHARED_GPU, "weights.transfer=auto"], "SharedBlock"),
        ([*SHARED_GPU, "weights.transfer=shared_memory"], "SharedBlock"),
        (["weights.transfer=auto"], "SharedBlock"),
    ],
)
def test_weights_are_handed_over_in_memory_of_the_gpu_only_where_that_is_asked_for(
    overrides: list[str], expected: str, tmp_path: Path
) -> None:
    world = World(tmp_path, *overrides)

    async def story() -> None:
        generator = Generator(Still().open)
        async with pushing(world):
            await generator.sleeping.start()
            world.join("a", generator)
            await world.pusher.take_device()
            await world.pusher.publish(0)
            await world.pusher.live(0)
        assert generator.heard == ["Sleep", expected]

    run(story())


def test_who_does_not_sleep_is_cut_off_and_the_learner_has_the_device(tmp_path: Path) -> None:
    world, engine = World(tmp_path, "timeouts.start_s=42"), Still()

    async def story() -> None:
        generators = {name: Generator(engine.open) for name in ("good", "hangs", "breaks")}
        generators["hangs"].fails_with = DeadlineExceeded("it hangs")
        generators["breaks"].fails_with = WeightsError("no")
        async with pushing(world):
            for name, generator in generators.items():
                world.join(name, generator)
            await world.pusher.take_device()
            assert world.device.is_learners

    run(story())
    # Not heard of before, so it may have been starting: 42 s more (timeouts.start_s).
    late = "it did not go to sleep within 49 s (timeouts.start_s / 6)"
    assert {e.name: e.reason for e in world.cut_off} == {
        "hangs": f"{late}: DeadlineExceeded: it hangs",
        "breaks": f"{late}: WeightsError: no",
    }


def test_an_order_of_a_dead_learner_does_not_wake_a_generator(tmp_path: Path) -> None:
    async def story() -> None:
        generator = Generator(Still().open)
        await generator.sleeping.sleep(Sleep(handover=9))
        with pytest.raises(
            WeightsError, match="an order of handover 8 came after one of handover 9"
        ):
            async with generator.sleeping.waking(8):
                raise AssertionError("it woke")

    run(story())


async def test_time_asleep_counts_for_no_limit() -> None:
    loop = asyncio.get_running_loop()
    generator = Generator(Still().open)
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


async def _ask(activity: Activity) -> None:
    with activity.blocked("admission: the learner is behind"):
        await asyncio.get_running_loop().create_future()


async def test_a_sleeping_generator_says_who_has_the_device() -> None:
    sleeps = "generation sleeps: the learner uses the device"
    generator = Generator(Still().open)
    await generator.sleeping.start()
    said = []
    telling = asyncio.create_task(generator.sleeping.report())
    asking = asyncio.create_task(_ask(generator.activity))
    await asyncio.to_thread(lambda: None)
    with generator.activity("generating"):
        for is_asleep in (True, False):
            if is_asleep:
                await generator.sleeping.sleep(Sleep(handover=1))
            else:
                async with generator.sleeping.waking(1):
                    pass
            for _ in range(3):
                await asyncio.to_thread(lambda: None)
            said.append(generator.activity.snapshot()[:2])
    telling.cancel()
    asking.cancel()
    assert said == [("blocked", sleeps), ("generating", "")]
