"""Says of a process that serves and is not heard of any more since when that is so, and what its
machine says of it.

takes: the members as the registry holds them
gives: the members with state `silent` and the cause in `waits_for`; a sentence when one falls
silent or is heard again
woken by: the heartbeats of the others
Used by the supervisor; a process that stays silent for supervisor.heartbeat_timeout_s is ended by
the fleet.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import psutil

from async_rl.config.run import RunConfig
from async_rl.protocol.membership import Member
from async_rl.supervision.registry import Registry

SILENT = "silent"
_MISSED_BEATS = 2.5
_LEAST_S = 2.0
"""A busy machine delays a heartbeat by a second or so."""
_CONDITIONS = {
    psutil.STATUS_STOPPED: "stopped by a signal; kill -CONT {pid} lets it go on",
    psutil.STATUS_TRACING_STOP: "held by a debugger",
    psutil.STATUS_DISK_SLEEP: "in the kernel, waiting for a disk or a device",
    psutil.STATUS_RUNNING: "computing, with nothing else let through",
    psutil.STATUS_SLEEPING: "in a call that does not return",
    psutil.STATUS_ZOMBIE: "dead",
}


class Silence:
    """Watches who is not heard of. tell: takes the sentence for log and TensorBoard."""

    def __init__(self, registry: Registry, config: RunConfig, tell: Callable[[str], None]) -> None:
        self._registry = registry
        self._after_s = max(_LEAST_S, _MISSED_BEATS * config.supervisor.heartbeat_s)
        self._timeout_s = config.supervisor.heartbeat_timeout_s
        self._is_here = config.launcher == "local"
        self._tell = tell
        self._told: dict[str, int] = {}

    def members(self) -> list[Member]:
        """All processes as they are now."""
        return [self._as_seen(member) for member in self._registry.members]

    def look(self) -> None:
        """Tells who has fallen silent since the last look, and who is heard again."""
        for member in self.members():
            if member.state == SILENT and self._told.get(member.name) != member.pid:
                self._told[member.name] = member.pid
                self._tell(f"{member.name} is silent: {member.waits_for}")
            elif (
                member.state != SILENT
                and self._told.pop(member.name, None) == member.pid
                and self._registry.is_serving(member.name)
            ):
                self._tell(f"{member.name} is heard again")

    def _as_seen(self, member: Member) -> Member:
        quiet_s = self._registry.quiet_s(member.name)
        if not self._registry.is_serving(member.name) or quiet_s < self._after_s:
            return member
        condition = f"; {self._condition(member.pid)}" if self._is_here else ""
        text = (
            f"not heard of for {quiet_s:.0f} s, {member.state} before{condition}; it is ended and"
            f" started again at {self._timeout_s:g} s"
        )
        return msgspec.structs.replace(member, state=SILENT, waits_for=text)

    @staticmethod
    def _condition(pid: int) -> str:
        try:
            status = psutil.Process(pid).status()
        except psutil.Error:
            return "dead"
        return _CONDITIONS.get(status, f"in state {status}").format(pid=pid)
