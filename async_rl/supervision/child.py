"""One process across its lives: its start, its end, and the reason for the end."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.core.frozen import frozen
from async_rl.core.os import RESTART_CODE
from async_rl.observability.logs import output_path
from async_rl.planning.topology import ProcessSpec
from async_rl.supervision.launcher import Launcher, ProcessHandle
from async_rl.supervision.liveness import Liveness
from async_rl.supervision.registry import Registry, in_time

_log = logging.getLogger(__name__)
_LAST_LINES = 15
_LAST_ERRORS = 3
# vLLM's message for an engine process that failed: the cause is in the output alone.
_ELSEWHERE = "See root cause above"
_EXCEPTION = re.compile(r"^(?:\(.*?\] )?(\w+(?:Error|Exception): .*)$", re.MULTILINE)
_PLACED_SOON_S = 5.0  # a process that waits longer for resources of the cluster is logged


@frozen
class End:
    """The end of one life. is_own_failure: an error of the process, not a signal or silence."""

    child: Child
    reason: str
    is_own_failure: bool


@dataclass(kw_only=True, eq=False)
class Child:
    """A process that the fleet keeps.

    is_added: it joined a live run. failure: root cause that the process reported in this life.
    expelled: reason why the learner removed it in this life. ends_run: it must not be restarted.
    is_leaving: it was removed. stopping: set once the run stops. has_left: set once a removed
    process is gone and forgotten.
    """

    spec: ProcessSpec
    run_dir: Path
    launcher: Launcher
    registry: Registry
    liveness: Liveness
    stopping: asyncio.Event
    is_added: bool = False
    was_ready: bool = False
    is_leaving: bool = False
    ends_run: bool = False
    failure: str = ""
    expelled: str = ""
    handle: ProcessHandle | None = None
    has_left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        """The name of the process."""
        return self.spec.name

    async def start(self) -> ProcessHandle:
        """Start the process, or request its resources from the cluster."""
        # Both belong to the previous life.
        self.failure = ""
        self.expelled = ""
        self.handle = handle = await self.launcher.start(self.spec)
        waits_for = "" if handle.pid else handle.waits_for
        self.registry.add(self.name, self.spec.role, handle.pid, waits_for=waits_for)
        # It may have been removed while the launcher started it.
        if self.is_leaving:
            handle.kill()
        return handle

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.handle is not None:
            self.handle.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.handle is not None:
            self.handle.kill()

    async def live(self, handle: ProcessHandle) -> End | None:
        """Wait for the end of a life; return None for a learner that finished.

        A process that is lost is killed first.
        """
        ended = asyncio.create_task(handle.wait(), name=f"wait {self.name}")
        lost = asyncio.create_task(self._until_lost(handle), name=f"hear {self.name}")
        silence = ""
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            # A learner that saves its last checkpoint may send no heartbeats; stop_s bounds that
            # time.
            if not ended.done() and not self.stopping.is_set():
                silence = lost.result()
                handle.kill()
            code = await ended
        finally:
            lost.cancel()
            # Also on cancellation: no child outlives the fleet.
            handle.kill()
            # Before mark_ended, after which it no longer serves.
            if self.registry.is_serving(self.name):
                self.was_ready = True
            self.registry.mark_ended(self.name)
        if code == 0 and self.spec.role == "learner":
            return None
        return self._end(code, silence, handle.why)

    async def _until_lost(self, handle: ProcessHandle) -> str:
        """As Liveness.until_lost; the start time starts once the process has its resources."""
        if not await in_time(handle.placed(), _PLACED_SOON_S):
            _log.warning("%s waits for %s", self.name, handle.waits_for)
            await handle.placed()
        if handle.pid:
            self.registry.record_pid(self.name, handle.pid)
            _log.info("%s started, pid %d", self.name, handle.pid)
        return await self.liveness.until_lost(self.name)

    def _end(self, code: int, silence: str, why: str) -> End:
        # The fleet's own kill also exits by a signal, so its reason comes first.
        is_own_failure = False
        if silence:
            reason = silence
            # A process that hangs before it was ever ready would hang again.
            is_own_failure = not self.was_ready
        elif self.expelled:
            reason = f"was removed by the learner: {self.expelled}"
        elif self.failure:
            reason = f"failed: {self.failure}"
            if _ELSEWHERE in self.failure:
                reason += f"\n{errors_in(output_path(self.run_dir, self.name))}"
            is_own_failure = True
        elif code == RESTART_CODE:
            reason = "asked to be started again"
        elif why:
            reason = why
        elif code < 0:
            reason = f"was ended by {signal.Signals(-code).name}"
        else:
            output = _last_lines(output_path(self.run_dir, self.name))
            reason = f"exited with code {code}; its last output was:\n{output}"
            is_own_failure = True
        return End(child=self, reason=reason, is_own_failure=is_own_failure)


def errors_in(path: Path) -> str:
    """Return the last exceptions that an output names, one per line; empty without any."""
    named = [line for line in _EXCEPTION.findall(_output(path)) if _ELSEWHERE not in line]
    return "\n".join(f"  {line}" for line in list(dict.fromkeys(named))[-_LAST_ERRORS:])


def _last_lines(path: Path) -> str:
    lines = _output(path).splitlines()
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (nothing)"


def _output(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
