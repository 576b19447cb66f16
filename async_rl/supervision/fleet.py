"""Keeps the processes of a run alive: starts them, notices their end or silence, and restarts them.

Rules
- A process that is lost (killed, silent, or failed after it was ready) is restarted after a growing
  pause, at most `max_restarts` times within the window.
- The learner's ranks live and die together: if one is lost, all restart from the last checkpoint.
- A learner that exits 0 has finished. One that reports its failure (a loss that is not
  finite, a batch over age) stops the run.
- A process that fails before it was ever ready would fail again, so the run stops with its root
  cause. A process that was added to a live run is given up instead, because the run works without
  it.
- A process that was removed is not restarted; it is forgotten.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import RunFailed
from async_rl.planning.topology import ProcessSpec
from async_rl.protocol.supervisor import Expel, ReportFatal
from async_rl.runtime.context import RENDEZVOUS_FILE
from async_rl.supervision.child import Child, End
from async_rl.supervision.launcher import Launcher
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry, in_time

_log = logging.getLogger(__name__)
# A rank that loses its peer may report an error before the peer's end is noticed. The real cause is
# the peer, so the fleet waits for its end.
_AFTERMATH_S = 2.0
# A process that crashes in a loop must not take the cores of other processes.
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


class Fleet:
    """The children of one run.

    children: by name, including those that are leaving. on_restart: called with the name of a
    process that was lost and is about to restart, and the reason. give_up: called with an added
    process that is not started again. failed: the reason why the run cannot continue.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        run_dir: Path,
        launcher: Launcher,
        registry: Registry,
        liveness: Liveness,
        max_restarts: int,
        timeouts: TimeoutsConfig,
    ) -> None:
        self._stopping = asyncio.Event()
        self._make_child = functools.partial(
            Child,
            run_dir=run_dir,
            launcher=launcher,
            registry=registry,
            liveness=liveness,
            stopping=self._stopping,
        )
        self.children: dict[str, Child] = {spec.name: self._make_child(spec=spec) for spec in specs}
        self._run_dir = run_dir
        self._registry = registry
        self._max_restarts = max_restarts
        self._timeouts = timeouts
        self._group = asyncio.TaskGroup()
        self.on_restart: Callable[[str, str], None]
        self.give_up: Callable[[ProcessSpec, str], None]
        loop = asyncio.get_running_loop()
        self.learner_done: asyncio.Future[None] = loop.create_future()
        self.failed: asyncio.Future[RunFailed] = loop.create_future()

    async def run(self) -> None:
        """Keep every process until a stop starts and all processes have exited."""
        async with self._group:
            learners = self._of_roles(["learner"])
            if learners:
                self._group.create_task(self._keep(learners), name="keep the learner")
            for child in self.children.values():
                # The learner's ranks are one unit; every other process is its own.
                if child not in learners:
                    self._keep_one(child)

    def add(self, spec: ProcessSpec) -> None:
        """Add a process to the live run. Its name must be free."""
        # A process that joins now would only delay the end of the run.
        if self._stopping.is_set():
            return
        child = self._make_child(spec=spec, is_added=True)
        self.children[spec.name] = child
        # At once, so that its pool counts it as starting.
        self._registry.add(spec.name, spec.role, 0)
        self._keep_one(child)

    def remove(self, name: str) -> None:
        """Do not restart the process after its exit; `Child.has_left` is set then.

        A process that is not ready yet has no work to finish and may not handle SIGTERM before its
        engine is up, so it is killed.
        """
        child = self.children[name]
        child.is_leaving = True
        if not self._registry.is_serving(name):
            child.kill()
        self._registry.drain(name)

    def note_fatal(self, message: ReportFatal) -> None:
        """Record the root cause that a process reports before it exits."""
        _log.error("%s failed: %s", message.name, message.text)
        child = self._living(message)
        if child is not None:
            child.failure = message.text
            child.ends_run = child.ends_run or message.ends_run

    def expel(self, message: Expel) -> None:
        """Kill a generator that the learner removed; it restarts as any lost process."""
        _log.warning("the learner removed %s: %s", message.name, message.reason)
        child = self._living(message)
        if child is not None:
            child.expelled = message.reason
            child.kill()

    def _living(self, message: ReportFatal | Expel) -> Child | None:
        """Return the process if it is still in this life: a report may come after it was removed or
        replaced.
        """
        child = self.children.get(message.name)
        if child is None or child.handle is None or child.handle.pid != message.pid:
            return None
        return child

    def begin_stop(self) -> None:
        """Restart no process from now on, and kill none because it is silent."""
        self._stopping.set()

    async def terminate(self, roles: Collection[str], *, timeout_s: float) -> bool:
        """Send SIGTERM to the processes of these roles, and SIGKILL to those that still start; wait
        until none of them runs. Return False after `timeout_s`.

        A starting process has no work to finish and may not handle SIGTERM for a long time.
        """
        children = self._of_roles(roles)
        for child in children:
            if child.spec.role == "learner" or self._registry.is_serving(child.name):
                child.terminate()
            else:
                child.kill()
        waits = [child.handle.wait() for child in children if child.handle is not None]
        # Only the waiting is cancelled, not the process; the caller decides about that.
        return await in_time(asyncio.gather(*waits, return_exceptions=True), timeout_s)

    def kill_all(self) -> None:
        """Send SIGKILL to every process."""
        self.begin_stop()
        for child in self.children.values():
            child.kill()

    def _of_roles(self, roles: Collection[str]) -> list[Child]:
        return [child for child in self.children.values() if child.spec.role in roles]

    def _keep_one(self, child: Child) -> None:
        self._group.create_task(self._keep_until_left(child), name=f"keep {child.name}")

    async def _keep_until_left(self, child: Child) -> None:
        reason = await self._keep([child])
        if self._stopping.is_set() or not (child.is_leaving or reason):
            return  # it fails the run, or stops with it
        del self.children[child.name]
        self._registry.forget(child.name)
        child.has_left.set()
        if reason:
            self.give_up(child.spec, reason)

    async def _keep(self, children: Sequence[Child]) -> str:
        """Keep one process, or several that live and die together.

        Return the reason why an added process is given up; otherwise an empty string.
        """
        window_s = self._timeouts.restart_window_s
        restarted_s: list[float] = []
        while not (self._stopping.is_set() or children[0].is_leaving):
            end = await self._live_together(children)
            if end is None:
                self.learner_done.set_result(None)
                return ""
            if self._stopping.is_set() or end.child.is_leaving:
                return ""
            child = end.child
            # The run worked without it before.
            if end.is_own_failure and child.is_added and not child.was_ready:
                return end.reason
            is_final = child.spec.role == "learner" or child.ends_run or not child.was_ready
            reason = f"{child.name} {end.reason}"
            if end.is_own_failure and is_final:
                self._fail(reason)
                return ""
            # Old restarts do not count: a run of weeks may lose a machine now and then.
            now_s = time.monotonic()
            restarted_s = [at_s for at_s in restarted_s if now_s - at_s <= window_s]
            # The cause is not temporary; restarting without limit would hide it.
            if len(restarted_s) >= self._max_restarts:
                self._fail(
                    f"{reason}; it was restarted {self._max_restarts} times within"
                    f" {window_s:g} s already (supervisor.max_restarts)"
                )
                return ""
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** len(restarted_s))
            restarted_s.append(now_s)
            names = " and ".join(each.name for each in children)
            _log.warning("%s; restarting %s in %.1f s", reason, names, pause_s)
            for each in children:
                self.on_restart(each.name, reason)
            await asyncio.sleep(pause_s)
        return ""

    async def _live_together(self, children: Sequence[Child]) -> End | None:
        """Start all and wait until they exit; return the first end, or None if all have finished.

        The loss of a process explains the failure of its peer, not the other way round.
        """
        if children[0].spec.role == "learner":
            # The ranks find each other through this file, which has the addresses of earlier ranks.
            (self._run_dir / RENDEZVOUS_FILE).unlink(missing_ok=True)
        handles = [await child.start() for child in children]
        lives = [
            asyncio.create_task(child.live(handle), name=f"life of {child.name}")
            for child, handle in zip(children, handles, strict=True)
        ]
        running = set(lives)
        ends: list[End] = []
        try:
            while running and not ends:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ends += _ends(done)
            if running and all(end.is_own_failure for end in ends):
                done, running = await asyncio.wait(running, timeout=_AFTERMATH_S)
                ends += _ends(done)
            # The remaining ranks wait for a rank that has exited.
            for child in children:
                child.kill()
            await asyncio.gather(*running)
        finally:
            for life in lives:
                life.cancel()
        return min(ends, key=lambda end: end.is_own_failure, default=None)

    def _fail(self, cause: str) -> None:
        if not self.failed.done():
            self.failed.set_result(RunFailed(cause))


def _ends(done: Collection[asyncio.Task[End | None]]) -> list[End]:
    return [end for end in (life.result() for life in done) if end is not None]
