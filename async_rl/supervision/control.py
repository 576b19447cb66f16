"""The supervisor's answers to the requests of children and of people."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.control import GetStatus, Pools, Scale, StatusReply, StopRun
from async_rl.protocol.learner import StartFrom
from async_rl.protocol.membership import (
    Expel,
    Heartbeat,
    Register,
    ReportFatal,
    ReportMetrics,
    WatchMembers,
)
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.liveness import Liveness, StallWatch
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.registry import Registry
from async_rl.supervision.scaler import Scaler
from async_rl.wire.rpc import Handler


class StopRequest:
    """Requests to stop the run: `graceful` after the step and a checkpoint, or `immediate`."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()

    def handle_signals(self) -> None:
        """Stop on SIGTERM and Ctrl-C; a second Ctrl-C stops immediately."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        # A batch system may send SIGTERM twice; only a person asks twice on purpose.
        if self.graceful.is_set() and number == signal.SIGINT:
            self.immediate.set()
        self.graceful.set()


class ControlService:
    """One handler per message of the control socket."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        registry: Registry,
        liveness: Liveness,
        stall_watch: StallWatch,
        monitor: Monitor,
        fleet: Fleet,
        scaler: Scaler,
        stop: StopRequest,
        log: logging.Logger,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._registry = registry
        self._liveness = liveness
        self._stall_watch = stall_watch
        self._monitor = monitor
        self._fleet = fleet
        self._scaler = scaler
        self._stop = stop
        self._log = log
        self._started_s = time.time()

    def handlers(self) -> dict[type[Message], Handler]:
        """The handler of each message."""
        return {
            Register: self._register,
            Heartbeat: self._heartbeat,
            WatchMembers: self._watch_members,
            ReportMetrics: self._report_metrics,
            ReportFatal: self._report_fatal,
            StartFrom: self._start_from,
            Expel: self._expel,
            GetStatus: self._get_status,
            StopRun: self._stop_run,
            Scale: self._scale,
        }

    async def _register(self, message: Register) -> Message:
        self._registry.register(message)
        self._log.info("%s serves at %s", message.name, message.address or "(no address)")
        return Ok()

    async def _heartbeat(self, message: Heartbeat) -> Message:
        self._registry.beat(message)
        self._stall_watch.observe()
        self._monitor.on_heartbeat()
        return Ok()

    async def _watch_members(self, message: WatchMembers) -> Message:
        directory = self._registry.directory
        # An unchanged list is an answer too: it shows that the supervisor is alive.
        try:
            async with asyncio.timeout(message.wait_s):
                await directory.changed(message.known_revision)
        except TimeoutError:
            pass
        return directory.snapshot()

    async def _report_metrics(self, message: ReportMetrics) -> Message:
        self._monitor.on_metrics(message)
        return Ok()

    async def _start_from(self, message: StartFrom) -> Message:
        self._monitor.start_from(message.version)
        return Ok()

    async def _report_fatal(self, message: ReportFatal) -> Message:
        self._log.error("%s failed: %s", message.name, message.text)
        self._fleet.note_fatal(message.name, message.text, ends_run=message.ends_run)
        return Ok()

    async def _expel(self, message: Expel) -> Message:
        self._log.warning("the learner removed %s: %s", message.name, message.reason)
        self._fleet.expel(message.name, message.pid, message.reason)
        return Ok()

    async def _get_status(self, _: GetStatus) -> Message:
        monitor = self._monitor
        return StatusReply(
            run_name=self._run_dir.name,
            run_dir=str(self._run_dir),
            step=monitor.step,
            num_steps=self._config.num_steps,
            started_s=self._started_s,
            tensorboard_url=monitor.tensorboard_url,
            members=self._liveness.members(),
            metrics=monitor.newest,
            stalled=monitor.stalled,
            restarted_because=monitor.restarted_because,
            pools=self._registry.pools(),
        )

    async def _scale(self, message: Scale) -> Message:
        self._scaler.scale(message.wanted, "as requested by a person", is_forced=message.is_forced)
        return Pools(pools=self._registry.pools())

    async def _stop_run(self, message: StopRun) -> Message:
        event = self._stop.graceful if message.is_graceful else self._stop.immediate
        event.set()
        return Ok()
