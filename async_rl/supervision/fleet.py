"""Keeps the processes of a run alive: starts them, notices their end or silence, starts them again,
and ends them all.

Rules
- A process that is lost (killed, silent, or failed after it was ready) is started again, after a
  growing pause, at most `max_restarts` times within the window.
- The learner's ranks live and die together: if one is lost, all start again, from the last
  checkpoint.
- A learner that exits 0 has finished. One that tells an error of its own (a loss that is not
  finite, a batch over age) ends the run.
- A process that fails by itself before it was ever ready would fail again: the run ends with its
  root cause.  One that was added to a
  live run is given up instead: the run got on without it.
- The end of a process that was let go is no loss; it is forgotten.
Used by the supervisor only.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from async_rl.config.running import SupervisorConfig
from async_rl.core.errors import RunFailed
from async_rl.planning.topology import ProcessSpec
from async_rl.supervision.launcher import Launcher, ProcessHandle
from async_rl.supervision.registry import Registry

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_LAST_LINES = 15
_SOON_S = 5.0
"""A process that has no place on the cluster by then is told of."""
_AFTERMATH_S = 2.0
"""A rank that loses its peer may tell its own error before the peer's end is noticed; so long is
waited for the peer's.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a life ended. is_own_failure: by an error of the process itself, not by a signal or for
    its silence.
    """

    reason: str
    is_own_failure: bool


class _Restarts:
    """The restarts of one process, or of the learner's ranks together."""

    def __init__(self, config: SupervisorConfig) -> None:
        self._config = config
        self._times_s: collections.deque[float] = collections.deque()

    def next_pause_s(self) -> float | None:
        """Seconds to wait before the next start; None if there were too many."""
        now = time.monotonic()
        self._times_s.append(now)
        while now - self._times_s[0] > self._config.restart_window_s:
            self._times_s.popleft()
        if len(self._times_s) > self._config.max_restarts:
            return None
        return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (len(self._times_s) - 1)))


class Fleet:
    """The children of one run."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        launcher: Launcher,
        registry: Registry,
        config: SupervisorConfig,
        on_lost: Callable[[ProcessSpec, str], Awaitable[None]],
        on_left: Callable[[ProcessSpec, str], Awaitable[None]],
        log: logging.Logger,
    ) -> None:
        self._specs = list(specs)
        self._launcher = launcher
        self._registry = registry
        self._config = config
        self._on_lost = on_lost
        self._on_left = on_left
        self._log = log
        self._handles: dict[str, ProcessHandle] = {}
        self._fatal: dict[str, str] = {}
        self._expelled: dict[str, str] = {}
        self._ends_run: set[str] = set()
        self._was_ready: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._added: set[str] = set()
        self._leaving: dict[str, asyncio.Event] = {}
        self._learners_left = {s.name for s in specs if s.role == "learner"}
        self._is_stopping = False
        self.learner_done = asyncio.Event()
        self.failed: asyncio.Future[RunFailed] = asyncio.get_running_loop().create_future()
        self.num_restarts = 0

    async def run(self) -> None:
        """Keeps every process until `stop` was called and all have ended."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if learners := [spec for spec in self._specs if spec.role == "learner"]:
                group.create_task(self._keep(learners), name="keep the learner")
            for spec in self._specs:
                if spec.role != "learner":
                    group.create_task(self._keep_until_left(spec), name=f"keep {spec.name}")

    @property
    def specs(self) -> list[ProcessSpec]:
        """Every process that is kept or has still to leave."""
        return list(self._specs)

    def is_leaving(self, name: str) -> bool:
        """Whether the process was let go."""
        return name in self._leaving

    def add(self, spec: ProcessSpec) -> None:
        """One more process, kept from now on. Its name must be free."""
        if self._group is None or self._is_stopping:
            return
        self._specs.append(spec)
        self._added.add(spec.name)
        self._registry.add(spec.name, spec.role, 0)
        self._group.create_task(self._keep_until_left(spec), name=f"keep {spec.name}")

    def let_go(self, name: str) -> None:
        """The process is not started again once it ends; one that is not ready yet ends now.
        `until_left` tells when it is gone.
        """
        self._leaving[name] = asyncio.Event()
        if not self._registry.is_serving(name) and name in self._handles:
            self._handles[
                name
            ].kill()  # it holds nothing, and may not hear SIGTERM before its engine is up
        self._registry.drain(name)

    async def until_left(self, name: str, *, timeout_s: float) -> bool:
        """Waits until a process that was let go has left; False if it has not by then."""
        if (left := self._leaving.get(name)) is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await left.wait()
            except TimeoutError:
                return False
        return True

    def end(self, name: str, *, at_once: bool) -> None:
        """SIGTERM, or SIGKILL, to one process."""
        if (handle := self._handles.get(name)) is not None:
            handle.kill() if at_once else handle.terminate()

    async def _keep_until_left(self, spec: ProcessSpec) -> None:
        why = await self._keep([spec])
        left = self._leaving.pop(spec.name, None)
        if (left is None and not why) or self._is_stopping:
            return  # it fails the run, or ends with it
        await self._on_left(spec, why)
        self._specs.remove(spec)
        self._handles.pop(spec.name, None)
        for names in (self._added, self._was_ready):
            names.discard(spec.name)
        self._registry.forget(spec.name)
        if left is not None:
            left.set()

    def note_fatal(self, name: str, text: str, *, ends_run: bool = False) -> None:
        """The process has told its root cause before it exits. ends_run: so it wants, and is not
        started again.
        """
        self._fatal[name] = text
        if ends_run:
            self._ends_run.add(name)

    def expel(self, name: str, pid: int, reason: str) -> None:
        """Ends a process that the learner cut off; it comes back as any lost one."""
        handle = self._handles.get(name)
        if handle is not None and handle.pid == pid:
            self._expelled[name] = reason
            handle.kill()

    async def _keep(self, specs: Sequence[ProcessSpec]) -> str:
        """Keeps one process, or several that live and die together. Why one that was added is given
        up; else empty.
        """
        restarts = _Restarts(self._config)
        while not self._is_stopping and not self.is_leaving(specs[0].name):
            spec, end = await self._live_together(specs)
            if self._is_stopping or end is None or self.is_leaving(spec.name):
                return ""
            if end.is_own_failure and spec.name in self._added - self._was_ready:
                return end.reason
            if end.is_own_failure and (
                spec.role == "learner"
                or spec.name not in self._was_ready
                or spec.name in self._ends_run
            ):
                self._fail(f"{spec.name} {end.reason}")
                return ""
            pause_s = restarts.next_pause_s()
            if pause_s is None:
                self._fail(
                    f"{spec.name} {end.reason}; it was started again {self._config.max_restarts}"
                    f" times within {self._config.restart_window_s:g} s already"
                    " (supervisor.max_restarts)"
                )
                return ""
            self.num_restarts += 1
            self._log.warning(
                "%s %s; starting %s again in %.1f s",
                spec.name,
                end.reason,
                " and ".join(s.name for s in specs),
                pause_s,
            )
            for lost in specs:
                await self._on_lost(lost, f"{spec.name} {end.reason}")
            await asyncio.sleep(pause_s)
        return ""

    async def _live_together(self, specs: Sequence[ProcessSpec]) -> tuple[ProcessSpec, _End | None]:
        """One life of all: who ended it and how, None if all have finished. A loss explains a
        peer's failure, not the other way round.
        """
        for spec in specs:
            await self._start(spec)
        lives = {
            asyncio.create_task(self._live(spec), name=f"life of {spec.name}"): spec
            for spec in specs
        }
        ended: dict[asyncio.Task[_End | None], _End] = {}
        running = set(lives)
        try:
            while running and not ended:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = {life: end for life in done if (end := life.result()) is not None}
            if running and all(end.is_own_failure for end in ended.values()):
                done, running = await asyncio.wait(running, timeout=_AFTERMATH_S)
                ended |= {life: end for life in done if (end := life.result()) is not None}
            for life in running:
                self._handles[lives[life].name].kill()
            await asyncio.gather(*running)
        finally:
            for life in lives:
                life.cancel()
        if not ended:
            return specs[0], None
        first = min(ended, key=lambda life: ended[life].is_own_failure)
        return lives[first], ended[first]

    async def _start(self, spec: ProcessSpec) -> None:
        self._fatal.pop(spec.name, None)
        self._expelled.pop(
            spec.name, None
        )  # of the life before, which had ended by itself meanwhile
        if spec.role == "learner":
            self._learners_left.add(spec.name)
        handle = await self._launcher.start(spec)
        self._handles[spec.name] = handle
        self._registry.add(
            spec.name, spec.role, handle.pid, waits_for="" if handle.pid else handle.waits_for
        )
        if self.is_leaving(spec.name):
            handle.kill()

    async def _until_silent(self, spec: ProcessSpec, handle: ProcessHandle) -> str:
        """As Registry.until_silent; the time of its start begins once it has a place."""
        try:
            async with asyncio.timeout(_SOON_S):
                await handle.placed()
        except TimeoutError:
            self._log.warning("%s waits for %s", spec.name, handle.waits_for)
            await handle.placed()
        if handle.pid:
            self._registry.place(spec.name, handle.pid)
            self._log.info("%s started, pid %d", spec.name, handle.pid)
        return await self._registry.until_silent(
            spec.name,
            start_timeout_s=self._config.start_timeout_s,
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
        )

    async def _live(self, spec: ProcessSpec) -> _End | None:
        """One life of a process that was started: returns how it ended, None for a learner that
        finished.
        """
        handle = self._handles[spec.name]
        ended = asyncio.create_task(handle.wait(), name=f"wait {spec.name}")
        silent = asyncio.create_task(
            self._until_silent(spec, handle), name=f"listen to {spec.name}"
        )
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            reason = None if ended.done() or self._is_stopping else silent.result()
            if reason is not None:
                handle.kill()
            code = await ended
        finally:
            silent.cancel()
            handle.kill()
            if self._registry.is_serving(spec.name):
                self._was_ready.add(spec.name)
            self._registry.mark(spec.name, "ended")
        return self._judge(spec, code, reason, handle.why)

    def _judge(self, spec: ProcessSpec, code: int, silence: str | None, why: str) -> _End | None:
        if code == 0 and spec.role == "learner":
            self._learners_left.discard(spec.name)
            if not self._learners_left:
                self.learner_done.set()
            return None
        if silence is not None:
            return _End(reason=silence, is_own_failure=spec.name not in self._was_ready)
        if spec.name in self._expelled:
            return _End(
                reason=f"was cut off by the learner: {self._expelled.pop(spec.name)}",
                is_own_failure=False,
            )
        if spec.name in self._fatal:
            return _End(reason=f"failed: {self._fatal[spec.name]}", is_own_failure=True)
        if why:
            return _End(reason=why, is_own_failure=False)
        if code < 0:
            return _End(reason=f"was ended by {signal.Signals(-code).name}", is_own_failure=False)
        return _End(
            reason=f"exited with code {code}; its last output was:\n{self._tail(spec.name)}",
            is_own_failure=True,
        )

    def _tail(self, name: str) -> str:
        try:
            lines = self._launcher.output_of(name).read_text(errors="replace").splitlines()
        except OSError:
            return "(none)"
        return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (nothing)"

    def _fail(self, cause: str) -> None:
        if not self.failed.done():
            self.failed.set_result(RunFailed(cause))

    def begin_stop(self) -> None:
        """From now on an end is an end."""
        self._is_stopping = True

    def terminate(self, roles: Sequence[str]) -> None:
        """SIGTERM to every process of these roles that serves; one that still starts holds nothing
        and may not hear it for long.
        """
        for spec in self._specs:
            if spec.role in roles and (handle := self._handles.get(spec.name)) is not None:
                (
                    handle.terminate
                    if self._registry.is_serving(spec.name) or spec.role == "learner"
                    else handle.kill
                )()

    async def all_ended(self, roles: Sequence[str], *, timeout_s: float) -> bool:
        """Waits until no process of these roles runs; False if some still do after timeout_s."""
        waits = [
            asyncio.create_task(self._handles[s.name].wait(), name=f"end of {s.name}")
            for s in self._specs
            if s.role in roles and s.name in self._handles
        ]
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in pending:
            wait.cancel()
        return not pending

    def kill_all(self) -> None:
        """SIGKILL to everything."""
        self._is_stopping = True
        for handle in self._handles.values():
            handle.kill()
