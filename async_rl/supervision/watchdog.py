"""Ends a run that stands still, after it has said so: first a warning in log, status and
TensorBoard, at the deadline the run fails.

takes: the members with every heartbeat
waits for: the deadline of the next learner step
gives: a sentence that names who waits for what and since when
woken by: the clock; a step after a stall that was told
Used by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from async_rl.config.running import SupervisorConfig
from async_rl.core.errors import RunFailed
from async_rl.monitoring.stall import Stall, sentence
from async_rl.supervision.registry import Registry

_MISSED_BEATS = 5
"""So many heartbeats late, a process is said to be silent."""


class Watchdog:
    """Watches the learner's version. warn: told the sentence when the run stalls, and the empty one
    when it goes on.
    """

    def __init__(
        self, registry: Registry, config: SupervisorConfig, warn: Callable[[str], None]
    ) -> None:
        self._registry = registry
        self._config = config
        self._warn = warn
        self._stall = Stall(time.monotonic())
        self._told_s: float | None = None
        self._went_on = asyncio.Event()

    def on_heartbeat(self) -> None:
        """A process has told what it does."""
        self._stall.observe(self._registry.members, time.monotonic())
        if self._told_s is not None and self._stall.since_s > self._told_s:
            self._told_s = None
            self._went_on.set()
            self._warn("")

    async def run(self) -> None:
        """Until cancelled. Raises RunFailed, with the sentence, at supervisor.stall_timeout_s."""
        while True:
            now_s = time.monotonic()
            stalled_s = now_s - self._stall.since_s
            if stalled_s >= self._config.stall_timeout_s:
                raise RunFailed(
                    f"{self._sentence(stalled_s)}"
                    f" (supervisor.stall_timeout_s={self._config.stall_timeout_s:g})"
                )
            if stalled_s >= self._config.stall_warning_s and self._told_s is None:
                self._told_s = now_s
                self._warn(self._sentence(stalled_s))
            limit_s = (
                self._config.stall_warning_s
                if self._told_s is None
                else self._config.stall_timeout_s
            )
            self._went_on.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(self._stall.since_s + limit_s - now_s, 0.0)):
                    await self._went_on.wait()

    def _sentence(self, stalled_s: float) -> str:
        unheard_s = self._registry.unheard_s(_MISSED_BEATS * self._config.heartbeat_s)
        return sentence(
            self._registry.members, stalled_s=stalled_s, now_s=time.time(), unheard_s=unheard_s
        )
