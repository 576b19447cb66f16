"""The supervisor's answers to the requests of children and of people."""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import StartFrom
from async_rl.protocol.supervisor import (
    Expel,
    GetStatus,
    Heartbeat,
    NextBeat,
    Register,
    ReportFatal,
    ReportMetrics,
    Scale,
    StopRun,
    WatchMembers,
)
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry, in_time
from async_rl.supervision.scaler import Scaler
from async_rl.wire.rpc import Handler

_log = logging.getLogger(__name__)
_REFRESH_S = 1.0
_ANSWERS_PER_S = 500
"""Answers with changes of the member list, to all processes together: 2,048 of them learn of a
change within 4 s, which takes a twentieth of a core.
"""
GATHER_S = 0.01
"""Pause that collects requests. Nothing here is so urgent, and with 540 heartbeats per
second a request takes 0.20 ms instead of 0.25.
"""


class StopRequest:
    """Requests to stop the run: `graceful` after the step and a checkpoint, or `immediate`. Each is
    done once it is requested.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.graceful: asyncio.Future[None] = loop.create_future()
        self.immediate: asyncio.Future[None] = loop.create_future()

    def handle_signals(self) -> None:
        """Stop on SIGTERM, Ctrl-C and a closed terminal; a second Ctrl-C stops immediately."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, so that the run continues without its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def request(self, message: StopRun) -> None:
        """Stop as a person requests it."""
        _request(self.graceful if message.is_graceful else self.immediate)

    def _on_signal(self, number: signal.Signals) -> None:
        # A batch system may send SIGTERM twice; only a person interrupts twice on purpose.
        if self.graceful.done() and number == signal.SIGINT:
            _request(self.immediate)
        _request(self.graceful)


def _request(stop: asyncio.Future[None]) -> None:
    if not stop.done():
        stop.set_result(None)


def handlers(
    *,
    registry: Registry,
    liveness: Liveness,
    monitor: Monitor,
    fleet: Fleet,
    scaler: Scaler,
    stop: StopRequest,
) -> dict[type[Message], Handler]:
    """Return the handler of each message of the control socket."""

    async def register(message: Register) -> Message:
        registry.register(message)
        _log.info("%s serves at %s", message.name, message.address or "(no address)")
        return Ok()

    async def heartbeat(message: Heartbeat) -> Message:
        registry.beat(message)
        return NextBeat(after_s=liveness.heartbeat_s)

    async def watch_members(message: WatchMembers) -> Message:
        roles = frozenset(message.roles)
        # An unchanged list is an answer too: it shows that the supervisor is alive.
        await in_time(registry.news(message.known_revision, roles), message.wait_s)
        # Changes that come together are sent together: when a large run starts, each of its
        # processes would otherwise receive one message for each other process.
        await asyncio.sleep(len(registry) / _ANSWERS_PER_S)
        return registry.changes_since(message.known_revision, roles)

    async def get_status(_: GetStatus) -> Message:
        return monitor.status()

    return {
        Register: register,
        Heartbeat: heartbeat,
        WatchMembers: watch_members,
        ReportMetrics: _then_ok(monitor.on_metrics),
        ReportFatal: _then_ok(fleet.note_fatal),
        StartFrom: _then_ok(monitor.start_from),
        Expel: _then_ok(fleet.expel),
        GetStatus: get_status,
        StopRun: _then_ok(stop.request),
        Scale: _then_ok(lambda message: scaler.scale(message.wanted)),
    }


async def refresh(monitor: Monitor) -> None:
    """Read the heartbeats once per second until cancelled.

    Reading costs time for every process, so it must not follow each heartbeat.
    """
    while True:
        monitor.refresh()
        await asyncio.sleep(_REFRESH_S)


def _then_ok(act: Callable[[Any], None]) -> Handler:
    """Return the handler of a message whose sender needs no other answer."""

    async def handle(message: Message) -> Message:
        act(message)
        return Ok()

    return handle
