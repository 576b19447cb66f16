"""A generator's side of placement=colocated: its engine starts, rests and wakes as the learner
says.

takes: orders to rest, pushes
waits for: the first push, before the engine starts and touches the device; after an order to rest,
the next push
gives: an engine that writes, and time limits that stand still while it does not
woken by: the learner
With placement=disaggregated no order to rest ever comes, and the engine starts before the first
push.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from async_rl.generation.engine import Engine
from async_rl.observability.activity import Activity
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Rest
from async_rl.weights.turns import Orders

_WHY = "generation rests: the learner holds the device"


class Resting:
    """Whether one engine may be used."""

    def __init__(self, engine: Engine, activity: Activity) -> None:
        self._engine = engine
        self._activity = activity
        self._orders = Orders()
        self._one_at_a_time = asyncio.Lock()
        self._is_called = asyncio.Event()
        self._has_started = asyncio.Event()
        self._rests = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._limits: dict[asyncio.Timeout, float] = {}
        """Time limits of what is in flight, with the seconds left of those that stand still."""

    async def start(self) -> None:
        """Starts the engine."""
        await self._engine.start()
        self._has_started.set()

    async def start_when_called(self) -> None:
        """Starts the engine when the first push comes."""
        await self._is_called.wait()
        await self.start()

    async def rest(self, request: Rest) -> Message:
        """Stands still and lets go of the device; at once if the engine has not started."""
        async with self._one_at_a_time:
            self._orders.accept(request.turn)
            if self._has_started.is_set():
                await self._engine.rest()
            self._stop_limits()
            self._goes_on.clear()
            self._rests.set()
        return Ok()

    @contextlib.asynccontextmanager
    async def waking(self, turn: int) -> AsyncIterator[None]:
        """Around a load of weights, which wakes the engine; it stays at rest if the load fails.
        Raises WeightsError for an old order.
        """
        async with self._one_at_a_time:
            self._orders.accept(turn)
            self._is_called.set()
            await self._has_started.wait()
            yield
            self._rests.clear()
            self._goes_on.set()
            self._let_limits_run()

    async def tell(self) -> None:
        """takes: nothing · waits for: a rest, then its end · gives: what people see meanwhile ·
        woken by: rest and waking
        """
        while True:
            await self._rests.wait()
            with self._activity.held_back("generating", by=_WHY), self._activity.blocked(_WHY):
                await self._goes_on.wait()

    @contextlib.asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[None]:
        """As asyncio.timeout, without the time at rest."""
        async with asyncio.timeout(None if self._rests.is_set() else timeout_s) as timeout:
            self._limits[timeout] = timeout_s
            try:
                yield
            finally:
                del self._limits[timeout]

    def _stop_limits(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for timeout in self._limits:
            if (when_s := timeout.when()) is not None and not timeout.expired() and when_s > now_s:
                self._limits[timeout] = when_s - now_s
                timeout.reschedule(None)

    def _let_limits_run(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for timeout, left_s in self._limits.items():
            if timeout.when() is None:
                timeout.reschedule(now_s + left_s)
