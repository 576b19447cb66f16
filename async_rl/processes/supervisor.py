"""The supervisor: one run from start to end. It owns the children, the directory of processes, the
control socket and the metrics.

takes: configuration, a launcher; requests of children and of people; Ctrl-C
waits for: the learner's end, a failure, or a stop
gives: the run's directory; exit code 0 (finished or stopped as asked) or 1 (failed, root cause
first)
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError, RunFailed, root_cause
from async_rl.core.machine import free_memory_mb, this_machine
from async_rl.monitoring.console import Console
from async_rl.observability.logs import configure_logging
from async_rl.planning.headroom import Headroom
from async_rl.planning.topology import ProcessSpec, processes
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import ReleaseGenerator
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
from async_rl.runtime.context import RENDEZVOUS_FILE, Control
from async_rl.runtime.directory import Connections, Peer
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.launcher import Launcher
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.preparation import prepare
from async_rl.supervision.registry import Registry
from async_rl.supervision.scaler import Scaler, wanted_counts
from async_rl.supervision.watchdog import Watchdog
from async_rl.wire.addresses import supervisor_host
from async_rl.wire.keys import Keys, create_keys, write_private
from async_rl.wire.rpc import Handler, RpcServer

_FINAL_EVALUATION_S = 60.0
_CLOSE_S = 10.0


def run_supervised(*, config: RunConfig, run_dir: Path, launcher: Launcher) -> int:
    """Runs `config` in `run_dir` to its end; the run's exit code. Nothing is left running
    afterwards.
    """
    return asyncio.run(Supervisor(config=config, run_dir=run_dir, launcher=launcher).run())


class Supervisor:
    """The state of one run as its supervisor holds it."""

    def __init__(self, *, config: RunConfig, run_dir: Path, launcher: Launcher) -> None:
        self._config = config
        self._run_dir = run_dir.absolute()
        self._launcher = launcher
        self._log = configure_logging(self._run_dir, "supervisor")
        self._registry = Registry()
        self._console = Console(config, self._run_dir)
        self._monitor = Monitor(config, self._run_dir, self._registry, self._console, self._log)
        self._watchdog = Watchdog(self._registry, config.supervisor, self._monitor.on_stall)
        self._started_s = time.time()
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def run(self) -> int:
        """From keys to exit code; see the module's docstring."""
        keys = create_keys(self._run_dir / "keys")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            with self._monitor:
                self._console.started(self._monitor.tensorboard_url, self._monitor.prometheus_url)
                await self._unless_stopped(self._live(keys))
        except RunFailed as failure:
            return self._end("failed", str(failure))
        except AsyncRLError as error:
            return self._end("failed", f"{type(error).__name__}: {error}")
        except OSError as error:
            return self._end(
                "failed",
                f"{self._run_dir} cannot be used ({error}); make room or give permission, then"
                " async-rl resume the run",
            )
        return self._end(
            "stopped" if self._stop_asked.is_set() or self._stop_now.is_set() else "finished", ""
        )

    async def _unless_stopped(self, life: Coroutine[Any, Any, None]) -> None:
        """Runs the coroutine; a second Ctrl-C cancels it, and its `finally` ends the children at
        once.
        """
        task = asyncio.create_task(life, name="life of the run")
        now = asyncio.create_task(self._stop_now.wait(), name="stop at once")
        await asyncio.wait({task, now}, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not task.done():
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self._log.warning("stopped at once; the last checkpoint is what remains")
        except BaseExceptionGroup as group:
            raise root_cause(group) from group

    async def _live(self, keys: Keys) -> None:
        model_path = await self._prepare_model()
        if self._stop_asked.is_set() or model_path is None:
            return
        try:
            await self._with_children(keys, model_path, host=await self._launcher.open())
        finally:
            await self._launcher.close()

    async def _with_children(self, keys: Keys, model_path: Path, *, host: str) -> None:
        network = self._config.network
        with RpcServer(
            supervisor_host(network, host), network.control_port, keys, self._handlers()
        ) as server:
            control = Control(
                address=server.address,
                pid=os.getpid(),
                machine=platform.node(),
                model_path=str(model_path),
            )
            write_private(self._run_dir / "control.json", msgspec.json.encode(control))
            self._clear_rendezvous()
            self._connections = Connections(keys, self._registry.directory)
            machine, self._registry.wanted = (
                this_machine(),
                wanted_counts(self._config, self._run_dir),
            )
            self._fleet = Fleet(
                processes(self._config, machine, self._registry.wanted),
                launcher=self._launcher,
                registry=self._registry,
                config=self._config.supervisor,
                on_lost=self._on_lost,
                on_left=self._on_left,
                log=self._log,
            )
            self._scaler = Scaler(
                self._config,
                self._run_dir,
                machine=machine,
                fleet=self._fleet,
                registry=self._registry,
                connect=self._connections,
                headroom=Headroom(self._config, model_path, free_memory_mb),
                log=self._log,
            )
            serving = asyncio.create_task(server.serve(), name="control server")
            keeping = asyncio.create_task(self._fleet.run(), name="fleet")
            try:
                await self._until_over(serving, keeping)
                await self._leave(keeping)
            finally:
                self._fleet.kill_all()
                serving.cancel()
                await asyncio.gather(keeping, serving, return_exceptions=True)
                await self._connections.close()

    async def _prepare_model(self) -> Path | None:
        """The start model; None if a stop was asked meanwhile."""
        preparing = asyncio.create_task(
            prepare(self._run_dir, self._console.preparing), name="prepare model"
        )
        asked = asyncio.create_task(self._stop_asked.wait(), name="stop asked")
        await asyncio.wait({preparing, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if preparing.done():
            return preparing.result()
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        return None

    async def _until_over(self, serving: asyncio.Task[None], keeping: asyncio.Task[None]) -> None:
        """Returns when the learner finished or a stop was asked; raises the root cause of a
        failure.
        """
        done = asyncio.create_task(self._fleet.learner_done.wait(), name="learner done")
        asked = asyncio.create_task(self._stop_asked.wait(), name="stop asked")
        watching = asyncio.create_task(self._watchdog.run(), name="watchdog")
        scaling = asyncio.create_task(self._scaler.run(), name="scaler")
        try:
            ends: set[asyncio.Future[Any]] = {
                done,
                asked,
                self._fleet.failed,
                serving,
                keeping,
                watching,
                scaling,
            }
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._fleet.failed.done():
                raise self._fleet.failed.result()
            for broken in (serving, keeping, watching, scaling):
                if broken.done() and not done.done():
                    broken.result()
        finally:
            for task in (done, asked, watching, scaling):
                task.cancel()

    async def _leave(self, keeping: asyncio.Task[None]) -> None:
        """Ends the run in order: learner (finish the step, save), last evaluation, generators and
        verifiers, buffer.
        """
        was_asked = self._stop_asked.is_set()
        self._console.note(
            "stopping: the learner finishes its step and saves (Ctrl-C again to stop at once)"
            if was_asked
            else "finishing"
        )
        self._fleet.begin_stop()
        self._fleet.terminate(["learner"])
        timeout_s = self._config.supervisor.stop_timeout_s
        if not await self._fleet.all_ended(["learner"], timeout_s=timeout_s):
            self._log.warning(
                "the learner did not end within %g s and is killed; the last checkpoint is what"
                " remains",
                timeout_s,
            )
        elif not was_asked:
            await self._monitor.until_evaluated(
                self._config.num_steps, timeout_s=_FINAL_EVALUATION_S
            )
        for roles in (["generator"], ["verifier", "buffer"]):
            self._fleet.terminate(roles)
            await self._fleet.all_ended(roles, timeout_s=_CLOSE_S)

    def _handlers(self) -> dict[type[Message], Handler]:
        return {
            Register: self._on_register,
            Heartbeat: self._on_heartbeat,
            WatchMembers: self._on_watch,
            ReportMetrics: self._on_metrics,
            ReportFatal: self._on_fatal,
            StartFrom: self._on_start_from,
            Expel: self._on_expel,
            GetStatus: self._on_status,
            StopRun: self._on_stop,
            Scale: self._on_scale,
        }

    async def _on_register(self, message: Register) -> Message:
        self._registry.register(message)
        self._log.info("%s serves at %s", message.name, message.address or "(nothing)")
        return Ok()

    async def _on_heartbeat(self, message: Heartbeat) -> Message:
        self._registry.beat(message)
        self._watchdog.on_heartbeat()
        self._monitor.on_heartbeat()
        return Ok()

    async def _on_watch(self, message: WatchMembers) -> Message:
        directory = self._registry.directory
        try:
            async with asyncio.timeout(message.wait_s):
                await directory.changed(message.known_revision)
        except TimeoutError:
            pass
        return directory.snapshot()

    async def _on_metrics(self, message: ReportMetrics) -> Message:
        self._monitor.on_metrics(message)
        return Ok()

    async def _on_start_from(self, message: StartFrom) -> Message:
        self._monitor.start_from(message.version)
        return Ok()

    async def _on_fatal(self, message: ReportFatal) -> Message:
        self._log.error("%s failed: %s", message.name, message.text)
        self._fleet.note_fatal(message.name, message.text, ends_run=message.ends_run)
        return Ok()

    async def _on_expel(self, message: Expel) -> Message:
        self._log.warning("the learner cut off %s: %s", message.name, message.reason)
        self._fleet.expel(message.name, message.pid, message.reason)
        return Ok()

    async def _on_status(self, _: GetStatus) -> Message:
        return StatusReply(
            run_name=self._run_dir.name,
            run_dir=str(self._run_dir),
            step=self._monitor.step,
            num_steps=self._config.num_steps,
            started_s=self._started_s,
            tensorboard_url=self._monitor.tensorboard_url,
            members=self._monitor.silence.members(),
            metrics=self._monitor.newest,
            stalled=self._monitor.stalled,
            restarted_because=self._monitor.restarted_because,
            pools=self._registry.pools(),
        )

    async def _on_scale(self, message: Scale) -> Message:
        self._scaler.scale(
            message.wanted, "as asked by async-rl scale", is_forced=message.is_forced
        )
        return Pools(pools=self._registry.pools())

    async def _on_stop(self, message: StopRun) -> Message:
        (self._stop_asked if message.is_graceful else self._stop_now).set()
        return Ok()

    async def _on_lost(self, spec: ProcessSpec, reason: str) -> None:
        """A process is gone: what it held goes back before it comes back."""
        self._monitor.on_restart(spec.name, reason)
        if spec.role == "learner":
            self._clear_rendezvous()
        await self._release(spec)

    async def _on_left(self, spec: ProcessSpec, why: str) -> None:
        """A process is gone for good, as was wanted or for the reason told."""
        await self._release(spec)
        if why:
            self._scaler.given_up(spec, why)

    async def _release(self, spec: ProcessSpec) -> None:
        if spec.role != "generator":
            return
        buffer = Peer("buffer", self._registry.directory, self._connections)
        try:
            await buffer.call(
                ReleaseGenerator(generator=spec.name, incarnation=""),
                timeout_s=self._config.network.call_timeout_s,
            )
        except AsyncRLError as error:
            self._log.warning(
                "the tickets of %s go back only after buffer.lease_timeout_s: %s", spec.name, error
            )

    def _clear_rendezvous(self) -> None:
        """The learner's ranks meet through a file, which holds the addresses of those who met there
        before.
        """
        (self._run_dir / RENDEZVOUS_FILE).unlink(missing_ok=True)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop_asked.is_set() and number == signal.SIGINT:
            self._stop_now.set()
        self._stop_asked.set()

    def _end(self, outcome: str, cause: str) -> int:
        """Says how the run ended, on the terminal, in the log and in `state.json`."""
        if cause:
            self._log.error("%s", cause)
        else:
            self._log.info("the run has %s", outcome)
        step = self._monitor.step
        state = {"outcome": outcome, "step": step, "cause": cause, "ended_s": time.time()}
        try:
            (self._run_dir / "state.json").write_bytes(msgspec.json.encode(state))
        except OSError as error:
            self._log.error("%s cannot be written: %s", self._run_dir / "state.json", error)
        self._console.end(outcome, cause, step)
        return 1 if cause else 0
