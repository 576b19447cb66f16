"""A generator's side of placement=colocated: its engine starts, sleeps and wakes as the learner
orders.

takes: orders to sleep, pushes
waits for: the first push, before the engine starts and touches the device; after an order to sleep,
the next push
returns: an engine that generates, and time limits that stop while it does not
woken by: the learner

With placement=disaggregated no order to sleep comes, and the engine starts before the first push.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from async_rl.generation.engine import Engine, OpenEngine
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Sleep
from async_rl.weights.handovers import Orders

_WHY = "generation sleeps: the learner uses the device"


class Sleeping:
    """One engine, and the periods of its permitted use."""

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
