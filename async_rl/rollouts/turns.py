"""The turns on a generator's engine: it sleeps while the learner uses its device, and the policies
of a service share its slots.

Invariants
- An engine sleeps from an order of the learner to the next push; the time limits of groups stop
  meanwhile. Orders of an earlier handover are refused.
- A sample of a service has tokens of one policy: while it runs, its slot is of no other one.
- The weights of a policy never become older, and a sample waits for those that it names.
- An adapter that is refused concerns its policy only.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from async_rl.core.checksums import damage
from async_rl.core.errors import DataError, WeightsError
from async_rl.core.types import NO_VERSION
from async_rl.generation.engine import Engine, OpenEngine, Serves
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Sleep
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.weights.block import SharedTensors
from async_rl.weights.handovers import Orders
from async_rl.weights.tensors import tensor_spec

_WHY = "generation sleeps: the learner uses the device"


class Sleeping:
    """A generator's side of placement=colocated: one engine, and the periods of its permitted use.

    takes: orders to sleep, pushes
    waits for: the first push, before the engine starts and touches the device; after an order to
    sleep, the next push
    returns: an engine that generates, and time limits that stop while it does not
    woken by: the learner

    With placement=disaggregated no order to sleep comes, and the engine starts before the first
    push.
    """

    def __init__(self, open_engine: OpenEngine, activity: Activity) -> None:
        self._open_engine = open_engine
        self._engine: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._activity = activity
        self._orders = Orders()
        self._one_at_a_time = asyncio.Lock()
        self._is_called = asyncio.Event()
        self._is_asleep = asyncio.Event()
        self._is_awake = asyncio.Event()
        self.limits: dict[asyncio.Timeout, float] = {}
        """Time limits of groups in flight, with the seconds left of those that are stopped."""

    @property
    def engine(self) -> Engine:
        """The engine. Only after `start`."""
        return self._engine.result()

    async def start(self) -> None:
        """Start the engine."""
        self._engine.set_result(await self._open_engine())

    async def start_when_called(self) -> None:
        """Start the engine when the first push comes."""
        await self._is_called.wait()
        await self.start()

    async def sleep(self, request: Sleep) -> Message:
        """Stop generation and release the device. An engine that has not started uses none."""
        # A push and an order to sleep may overlap when the learner restarts.
        async with self._one_at_a_time:
            self._orders.accept(request.handover)
            if self._engine.done():
                await self.engine.sleep()
            self._stop_limits()
            self._is_awake.clear()
            self._is_asleep.set()
        return Ok()

    @contextlib.asynccontextmanager
    async def waking(self, handover: int) -> AsyncIterator[Engine]:
        """Surround a load of weights, which wakes the engine; it stays asleep if the load fails.
        Raises WeightsError for an old order.
        """
        async with self._one_at_a_time:
            self._orders.accept(handover)
            # The first push wakes a process that waits to start its engine.
            self._is_called.set()
            # A cancelled push must not cancel the engine that others wait for.
            yield await asyncio.shield(self._engine)
            # A failed load has raised above, and the engine stays asleep.
            self._is_asleep.clear()
            self._is_awake.set()
            self._resume_limits()

    async def close(self) -> None:
        """End the engine, if it has started."""
        if self._engine.done():
            await self.engine.close()

    async def report(self) -> None:
        """Show in the activity that the engine sleeps, until cancelled."""
        while True:
            await self._is_asleep.wait()
            with self._activity.held_back("generating", by=_WHY), self._activity.blocked(_WHY):
                await self._is_awake.wait()

    @contextlib.asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[None]:
        """As asyncio.timeout, without the time asleep."""
        async with asyncio.timeout(None if self._is_asleep.is_set() else timeout_s) as timeout:
            self.limits[timeout] = timeout_s
            try:
                yield
            finally:
                del self.limits[timeout]

    def _stop_limits(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for timeout in self.limits:
            # A limit that has passed stays: its group fails as it would have before the sleep.
            when_s = timeout.when()
            if when_s is not None and not timeout.expired() and when_s > now_s:
                self.limits[timeout] = when_s - now_s
                # A group that waits for the learner is not late.
                timeout.reschedule(None)

    def _resume_limits(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for timeout, left_s in self.limits.items():
            if timeout.when() is None:
                timeout.reschedule(now_s + left_s)


class _Slot:
    """policy: its holder, or the directory of its weights; empty = the base model.
    num_running: samples.
    """

    policy = ""
    version = 0
    num_running = 0

    def __init__(
        self, engine: Serves, load: Callable[[LoadSlot | Sample], Awaitable[None]]
    ) -> None:
        self.engine = engine
        self._load = load

    async def load(self, wanted: LoadSlot | Sample) -> None:
        """Have these weights or newer ones. Raises DataError for damaged or refused ones."""
        if self.version < wanted.version:
            await self._load(wanted)
            self.version = wanted.version


class Slots:
    """The slots of one engine that serves a service whose weights change while it samples. An
    adapter has one of several slots; whole models take turns on the only one, the engine itself.

    model_path: the directory of the base model, if the programs train all weights.
    """

    def __init__(self, sleeping: Sleeping, model_path: Path | None = None) -> None:
        self._sleeping = sleeping
        self._base = model_path
        self._slots: Sequence[_Slot] = ()
        """The one that has waited longest for a sample is the first."""
        self._turn = asyncio.Lock()
        self._changing = asyncio.Lock()
        self._is_done = asyncio.Event()

    async def load(self, request: LoadSlot) -> Message:
        """Load the newest weights of a policy if it has a slot; later samples name them.

        Raises DataError for weights that are damaged or refused.
        """
        async with self._changing:
            for slot in self._slots:
                if slot.policy == request.policy:
                    await slot.load(request)
        return Ok()

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences: at once if the engine itself has the weights next to the slots, else as
        soon as they have a slot or another policy needs its slot no more.

        Raises DataError for a request that the engine refuses, and as `load`, Unavailable if the
        engine died.
        """
        # A service's configuration asks for such an engine.
        engine = cast("Serves", self._sleeping.engine)
        policy = request.policy
        if self._base:
            policy = request.policy or request.adapter
        elif not policy:
            return await engine.sample(request)
        # In the order of arrival, so that no policy waits forever for the slot of another one.
        async with self._turn:
            self._slots = self._slots or self._open(engine)
            while not (usable := self._usable(policy)):
                self._is_done.clear()
                await self._is_done.wait()
            slot = usable[0]
            self._slots = [*(other for other in self._slots if other is not slot), slot]
            async with self._changing:
                if slot.policy != policy:
                    # It must not be answered by these weights.
                    slot.version = NO_VERSION
                    slot.policy = policy
                await slot.load(request)
            slot.num_running += 1
        try:
            return await slot.engine.sample(msgspec.structs.replace(request, adapter=""))
        finally:
            slot.num_running -= 1
            self._is_done.set()

    def _open(self, engine: Serves) -> list[_Slot]:
        if self._base:
            return [_Slot(engine, functools.partial(_load_model, engine, self._base))]
        if not engine.places:
            raise DataError(
                "model.lora.slots leaves no slot for samplers of kind inflight; resume the service"
                " with at least 4"
            )
        return [_Slot(place, functools.partial(_load_adapter, place)) for place in engine.places]

    def _usable(self, policy: str) -> list[_Slot]:
        own = [slot for slot in self._slots if slot.policy == policy]
        return own or [slot for slot in self._slots if not slot.num_running]


async def _load_adapter(place: Engine, wanted: LoadSlot | Sample) -> None:
    if problem := await asyncio.to_thread(damage, Path(wanted.adapter)):
        raise DataError(f"{wanted.policy}: {problem}; save its weights again")
    # Nothing names the tensors of the base model, which is the same file everywhere.
    manifest = Manifest(version=wanted.version, path="", tensors=[], total_bytes=0, checksum=0)
    try:
        await place.load_weights(manifest, StoredFile(url=wanted.adapter))
    except WeightsError as error:
        # It concerns this policy only, and must not end a process.
        raise DataError(str(error)) from error


async def _load_model(engine: Engine, base: Path, wanted: LoadSlot | Sample) -> None:
    folder = Path(wanted.adapter) if wanted.adapter else base
    block, manifest = await asyncio.to_thread(_block_of, folder, wanted.version)
    try:
        await engine.load_weights(manifest)
    finally:
        block.close()


def _block_of(folder: Path, version: int) -> tuple[SharedTensors, Manifest]:
    tensors = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder} cannot be read: {error}") from error
    if not tensors:
        raise DataError(f"{folder} has no weights; save them for sampling again")
    block = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    return block, block.write(version, tensors.values())
