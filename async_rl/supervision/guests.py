"""Other runs that use this run's generators (model.lora.host): they are waited for at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from async_rl.monitoring.console import Console
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import Leave, Visit
from async_rl.supervision.control import StopRequest
from async_rl.supervision.fleet import Fleet
from async_rl.wire.rpc import Handler

_LOOK_S = 1.0


class Guests:
    """The generators of other runs that visited lately.

    clock: seconds. within_s: a generator that is silent for longer has exited; a process that was
    killed starts again within that time.
    """

    def __init__(self, clock: Callable[[], float], *, within_s: float) -> None:
        self._clock = clock
        self._within_s = within_s
        self._seen_s: dict[str, float] = {}

    def handlers(self) -> dict[type[Message], Handler]:
        """The handler of each message."""
        return {Visit: self._visit, Leave: self._leave}

    async def _visit(self, request: Visit) -> Message:
        self._seen_s[request.policy] = self._clock()
        return Ok()

    async def _leave(self, request: Leave) -> Message:
        self._seen_s.pop(request.policy, None)
        return Ok()

    @property
    def names(self) -> list[str]:
        """RUN/PROCESS of each of them."""
        now_s = self._clock()
        return sorted(n for n, seen_s in self._seen_s.items() if now_s - seen_s < self._within_s)

    async def until_none(self, fleet: Fleet, stop: StopRequest, console: Console) -> None:
        """After the learner's last step, wait until no other run is left, or a stop."""
        is_noted = False
        while fleet.learner_done.done() and self.names:
            # A person or a failure does not wait for other runs.
            if stop.graceful.done() or fleet.failed.done():
                return
            if not is_noted:
                console.note(
                    f"the last step is saved; the generators serve {', '.join(self.names)}"
                    " (model.lora.host) until those end, or until Ctrl-C"
                )
                is_noted = True
            # A guest that was killed sends no message, so its silence must be looked for.
            await asyncio.sleep(_LOOK_S)
