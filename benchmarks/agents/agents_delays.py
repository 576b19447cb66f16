"""Where a call of benchmarks/agents/agents.py waits: the lag of an event loop, the pauses of the
garbage collector, and the time that a request spends in the gateway's process.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EVERY_S = 0.005


class Delays:
    """The delays in one process, in milliseconds."""

    def __init__(self) -> None:
        self.lag_ms: list[float] = []
        self.gc_ms: list[float] = []
        self.call_ms: list[float] = []
        self.cpu_ms: list[float] = []
        """CPU time of the process while a task sleeps for an instant: without that of others."""
        self._began_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.gc_ms.append((time.perf_counter() - self._began_s) * 1000)

    async def watch(self) -> None:
        """Measure by how much the loop wakes a task too late, until cancelled."""
        while True:
            asked_s = time.perf_counter() + _EVERY_S
            cpu_s = time.process_time()
            await asyncio.sleep(_EVERY_S)
            self.cpu_ms.append((time.process_time() - cpu_s) * 1000)
            self.lag_ms.append((time.perf_counter() - asked_s) * 1000)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application; notes the time from a whole request to its answer."""

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            read_s = 0.0

            async def reading() -> Message:
                nonlocal read_s
                message = await receive()
                if not read_s and not message.get("more_body"):
                    read_s = time.perf_counter()
                return message

            await app(scope, reading, send)
            self.call_ms.append((time.perf_counter() - read_s) * 1000)

        return timed

    def told(self) -> dict[str, list[float]]:
        """Return (p50, p99, largest) of each kind since the last time."""
        kinds = {
            "lag_ms": self.lag_ms,
            "gc_ms": self.gc_ms,
            "call_ms": self.call_ms,
            "cpu_ms": self.cpu_ms,
        }
        found = {name: quantiles(values) for name, values in kinds.items()}
        for values in kinds.values():
            values.clear()
        return found


def quantiles(values: Sequence[float]) -> list[float]:
    """Return p50, p99 and the largest value; zeros for fewer than two."""
    if len(values) < 2:
        return [0.0, 0.0, 0.0]
    cuts = statistics.quantiles(values, n=100)
    return [cuts[49], cuts[98], max(values)]
