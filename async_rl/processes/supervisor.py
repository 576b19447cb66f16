"""The supervisor: one run from start to end. It owns the children, the member list, the control
socket and the metrics.

takes: a configuration and a launcher; requests of children and of people; Ctrl-C
waits for: the learner's end, a failure, or a stop
returns: the run's directory; exit code 0 (finished or stopped on request) or 1 (failed, with the
root cause)
"""

import asyncio
import logging
import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from async_rl.config.run import RunConfig
from async_rl.core.errors import AsyncRLError, InfrastructureError, RunFailed, root_cause
from async_rl.core.machine import this_machine
from async_rl.core.os import write_private
from async_rl.monitoring import events
from async_rl.monitoring.console import Console
from async_rl.observability.logs import configure_logging
from async_rl.planning.shape import read_shape
from async_rl.planning.topology import processes
from async_rl.protocol.base import message_schema
from async_rl.runtime.context import Control
from async_rl.runtime.directory import Connections
from async_rl.supervision.control import GATHER_S, StopRequest, handlers, refresh
from async_rl.supervision.fleet import Fleet
from async_rl.supervision.launcher import Launcher
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.monitor import Monitor
from async_rl.supervision.preparation import prepare
from async_rl.supervision.registry import Registry
from async_rl.supervision.scaler import Scaler, wanted_counts
from async_rl.training import checkpoints
from async_rl.wire.addresses import supervisor_host
from async_rl.wire.rpc import Keys, RpcServer, create_keys

_log = logging.getLogger(__name__)
_FINAL_EVALUATION_S = 60.0  # the final numbers are worth a minute, not an endless wait
_CLOSE_S = 10.0  # generators, verifiers and the buffer have nothing to save


def run_supervised(*, config: RunConfig, run_dir: Path, launcher: Launcher) -> int:
    """Run `config` in `run_dir` to its end; return the exit code. No process outlives the call."""

    async def run() -> int:
        return await Supervisor(config=config, run_dir=run_dir, launcher=launcher).run()

    return asyncio.run(run())


class Supervisor:
    """The supervisor of one run."""

    def __init__(self, *, config: RunConfig, run_dir: Path, launcher: Launcher) -> None:
        self._config = config
        self._run_dir = run_dir.absolute()
        self._launcher = launcher
        configure_logging(self._run_dir, "supervisor")
        self._console = Console(config, self._run_dir)
        self._registry = Registry()
        self._liveness = Liveness(
            self._registry,
            config.timeouts,
            is_local=config.launcher.is_one_machine,
            is_endless=config.agent.is_external,
        )
        self._stop = StopRequest()

    async def run(self) -> int:
        """Create keys, open the outputs, supervise until the end; return the exit code."""
        # First: Ctrl-C during the preparation must stop the run as well.
        self._stop.handle_signals()
        # A resumed run that fails before its learner starts is where its checkpoint is.
        step = max(checkpoints.versions(self._run_dir), default=0)
        cause = ""
        try:
            events.reserve_outcome(self._run_dir)
            keys = create_keys(self._run_dir / "keys")
            with Monitor(
                self._config,
                self._run_dir,
                step=step,
                registry=self._registry,
                liveness=self._liveness,
                console=self._console,
            ) as monitor:
                events.note(self._run_dir, "start", f"pid {os.getpid()}", step=step)
                self._console.started(monitor.tensorboard_url, monitor.prometheus_url)
                try:
                    await self._until_over_or_stopped(keys, monitor)
                finally:
                    step = monitor.step
        except RunFailed as failure:
            cause = str(failure)
        except AsyncRLError as error:
            cause = f"{type(error).__name__}: {error}"
        except OSError as error:
            cause = (
                f"{self._run_dir} cannot be used ({error}); free disk space or grant permission,"
                " then run async-rl resume"
            )
        return self._report_end(cause, step)

    async def _until_over_or_stopped(self, keys: Keys, monitor: Monitor) -> None:
        """Supervise the run; an immediate stop cancels that, which kills the children."""
        supervising = asyncio.create_task(self._supervise(keys, monitor), name="supervise")
        # The `finally` blocks below kill the children and close the launcher.
        self._stop.immediate.add_done_callback(lambda _: supervising.cancel())
        try:
            await supervising
        except asyncio.CancelledError:
            _log.warning("stopped immediately; resume continues from the last checkpoint")
        except BaseExceptionGroup as group:
            raise root_cause(group) from group

    async def _supervise(self, keys: Keys, monitor: Monitor) -> None:
        """Prepare model and prompts, start the children, wait for the end, end the children."""
        preparing = asyncio.create_task(
            prepare(self._run_dir, self._console.preparing), name="prepare"
        )
        self._stop.graceful.add_done_callback(lambda _: preparing.cancel())
        try:
            model_path = await preparing
        except asyncio.CancelledError:
            # A stop of any kind, while no process of the run exists.
            if self._stop.graceful.done():
                return
            raise
        try:
            host = await self._launcher.open()
            await self._with_children(keys, monitor, model_path, host)
        finally:
            await self._launcher.close()

    async def _with_children(
        self, keys: Keys, monitor: Monitor, model_path: Path, host: str
    ) -> None:
        connections = Connections(keys, self._registry.directory)
        machine = this_machine()
        self._registry.wanted = wanted_counts(self._config, self._run_dir)
        fleet = Fleet(
            processes(self._config, machine, self._registry.wanted),
            run_dir=self._run_dir,
            launcher=self._launcher,
            registry=self._registry,
            liveness=self._liveness,
            max_restarts=self._config.supervisor.max_restarts,
            timeouts=self._config.timeouts,
        )
        scaler = Scaler(
            config=self._config,
            run_dir=self._run_dir,
            machine=machine,
            fleet=fleet,
            registry=self._registry,
            connect=connections,
            shape=read_shape(model_path),
        )
        answers = handlers(
            registry=self._registry,
            liveness=self._liveness,
            monitor=monitor,
            fleet=fleet,
            scaler=scaler,
            stop=self._stop,
        )
        fleet.on_restart = monitor.on_restart
        fleet.give_up = scaler.give_up
        bind_host = supervisor_host(self._config.network, host)
        # A free port, because no other socket of a run has a fixed one that a firewall could allow.
        with RpcServer(bind_host, 0, keys, answers, gather_s=GATHER_S) as server:
            self._announce(server.address, model_path)
            serving = asyncio.create_task(server.serve(), name="control server")
            keeping = asyncio.create_task(fleet.run(), name="fleet")
            watching = [
                asyncio.create_task(refresh(monitor), name="refresh"),
                asyncio.create_task(scaler.run(), name="scaler"),
            ]
            try:
                await self._until_over(fleet, [serving, keeping, *watching])
                # A stall during the shutdown is not a failure, and scaling would delay it.
                for task in watching:
                    task.cancel()
                await self._end_children(fleet, monitor)
            finally:
                fleet.kill_all()
                for task in (serving, *watching):
                    task.cancel()
                await asyncio.gather(keeping, serving, *watching, return_exceptions=True)
                # Last: the fleet and the scaler call through these.
                await connections.close()

    def _announce(self, address: str, model_path: Path) -> None:
        """Write `control.json`, through which children and the command line find the supervisor."""
        control = Control(
            address=address,
            pid=os.getpid(),
            machine=platform.node(),
            model_path=str(model_path),
            messages=message_schema(),
        )
        # Private: whoever reads the address and the keys controls the run.
        write_private(self._run_dir / "control.json", msgspec.json.encode(control))

    async def _until_over(self, fleet: Fleet, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until the learner finished or a stop was requested; raise the cause of a failure."""
        done = fleet.learner_done
        ends: set[asyncio.Future[Any]] = {done, self._stop.graceful, fleet.failed, *tasks}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if fleet.failed.done():
            raise fleet.failed.result()
        # A task that returns before it is stopped has failed; after the learner's end that is
        # irrelevant.
        for task in tasks:
            if task.done() and not done.done():
                task.result()

    async def _end_children(self, fleet: Fleet, monitor: Monitor) -> None:
        """Stop the learner, which saves; wait for the last evaluation; stop the other processes."""
        was_requested = self._stop.graceful.done()
        self._console.note(
            "stopping: the learner finishes its step and saves (Ctrl-C again to stop immediately)"
            if was_requested
            else "finishing"
        )
        # Before the signal, or the fleet would restart the learner.
        fleet.begin_stop()
        timeout_s = self._config.timeouts.stop_s
        if not await fleet.terminate(["learner"], timeout_s=timeout_s):
            _log.warning(
                "the learner did not end within %g s and is killed; resume continues from the last"
                " checkpoint",
                timeout_s,
            )
        # A person who stops a run does not want to wait for numbers.
        elif not was_requested:
            last_step = self._config.num_steps
            await monitor.until_evaluated(last_step, timeout_s=_FINAL_EVALUATION_S)
        # The buffer last, because generators return their tickets to it.
        for roles in (["gateway"], ["generator"], ["verifier", "buffer"]):
            await fleet.terminate(roles, timeout_s=_CLOSE_S)

    def _report_end(self, cause: str, step: int) -> int:
        """Report the end on the terminal, in the log and in `state.json`; return the exit code."""
        is_stopped = self._stop.graceful.done() or self._stop.immediate.done()
        if cause:
            outcome = "failed"
            _log.error("%s", cause)
        else:
            outcome = "stopped" if is_stopped else "finished"
            _log.info("the run has %s", outcome)
        # The exit code and the terminal must tell the end even if the disk is full.
        try:
            events.write_outcome(self._run_dir, outcome=outcome, step=step, cause=cause)
            events.note(self._run_dir, outcome, cause, step=step)
        except (OSError, InfrastructureError) as error:
            _log.error("the outcome cannot be written: %s", error)
        self._console.end(outcome, cause, step)
        return 1 if cause else 0
