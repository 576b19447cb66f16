"""Decides from heartbeats whether a process is silent or lost, and from learner steps whether the
run is stalled.

One rule for every reader: a serving process is silent after 2.5 missed heartbeats (at least 2 s).
Time in which the supervisor itself did not run does not count.
Status, the log and the report of a stall then name it. It is lost, and the fleet restarts it, at
timeouts.silence_s. The buffer sees a lost generator leave the member list.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

import psutil
from msgspec.structs import replace

from async_rl.config.timeouts import TimeoutsConfig
from async_rl.core.errors import RunFailed
from async_rl.monitoring.rates import commonest_failure
from async_rl.monitoring.status import duration, wait_of
from async_rl.protocol.supervisor import SILENT, Member
from async_rl.supervision.registry import Registry

_MISSED_BEATS = 2.5  # a single late heartbeat is normal, and people should learn of two
_BEATS_PER_S = 250
"""Heartbeats of all processes together: each takes about 0.2 ms of the supervisor."""
_BEATS_PER_SILENCE = 3  # a process is reported as silent before it is lost, so more than 2.5
_LEAST_S = 2.0  # a busy machine delays a heartbeat by a second or so
_CONDITIONS = {
    psutil.STATUS_STOPPED: "stopped by a signal; kill -CONT {pid} continues it",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_DISK_SLEEP: "in the kernel, waiting for a disk or a device",
    psutil.STATUS_RUNNING: "computing without a pause for other tasks",
    psutil.STATUS_SLEEPING: "in a call that does not return",
    psutil.STATUS_ZOMBIE: "dead",
}


class Liveness:
    """The silent and lost processes of one run, and its stalls.

    is_local: the processes run on this machine, whose kernel knows their condition. since_s: time
    of the learner's last progress (a new version, or a new process), by the registry's clock.
    stalled: the sentence of a stall that was reported; empty while the run advances.
    A run without a learner step is reported at timeouts.stall_warning_s and stops at
    timeouts.stall_s, unless its samples come from programs outside (`is_endless`): the next one may
    start tomorrow.
    """

    def __init__(
        self,
        registry: Registry,
        config: TimeoutsConfig,
        *,
        is_local: bool,
        is_endless: bool = False,
    ) -> None:
        self._registry = registry
        self._config = config
        self._is_local = is_local
        self._limit_s = math.inf if is_endless else config.stall_s
        self._reported: set[tuple[str, int]] = set()
        self._progress = (-1, -1)
        self.since_s = registry.clock()
        self.stalled = ""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats of a process; more with hundreds of processes, so that the
        supervisor's work stays within bounds.
        """
        shared_s = len(self._registry) / _BEATS_PER_S
        # A process must send a few heartbeats before it may be called lost.
        longest_s = self._config.silence_s / _BEATS_PER_SILENCE
        return max(self._config.heartbeat_s, min(shared_s, longest_s))

    def silent_s(self) -> dict[str, float]:
        """Return the seconds since the last heartbeat of each silent process."""
        silent_after_s = max(_LEAST_S, _MISSED_BEATS * self.heartbeat_s)
        quiet_s = {
            member.name: self._registry.quiet_s(member.name)
            for member in self._registry.members
            if self._registry.is_serving(member.name)
        }
        return {name: s for name, s in quiet_s.items() if s >= silent_after_s}

    def members(self) -> list[Member]:
        """Return all processes; silent ones with state `silent` and the cause in `waits_for`."""
        silent_s = self.silent_s()
        members = []
        for member in self._registry.members:
            if member.name in silent_s:
                condition = f"; {_condition(member.pid)}" if self._is_local else ""
                text = (
                    f"no heartbeat for {silent_s[member.name]:.0f} s, {member.state} before"
                    f"{condition}; restarted at {self._config.silence_s:g} s"
                )
                member = replace(member, state=SILENT, waits_for=text)
            members.append(member)
        return members

    def changes(self) -> list[str]:
        """Return a sentence per process that became silent or recovered since the last call."""
        members = self.members()
        silent = {(m.name, m.pid): m.waits_for for m in members if m.state == SILENT}
        serving = {(m.name, m.pid) for m in members if m.state not in _AWAY}
        news = [
            f"{life[0]} is silent: {reason}"
            for life, reason in silent.items()
            if life not in self._reported
        ]
        # A process that exited or was replaced has not recovered.
        recovered = sorted((self._reported & serving) - silent.keys())
        self._reported = set(silent)
        return news + [f"{name} sends heartbeats again" for name, _ in recovered]

    async def until_lost(self, name: str) -> str:
        """Return the reason once the process made no progress with its start, or stopped its
        heartbeats.
        """
        start_s = self._config.start_s
        silence_s = self._config.silence_s
        while True:
            # The start may take as long as it advances; from the registration on, the short limit
            # applies.
            if self._registry.is_serving(name):
                left_s = silence_s - self._registry.quiet_s(name)
                reason = f"sent no heartbeat for {silence_s:g} s"
            else:
                left_s = start_s - self._registry.stuck_s(name)
                reason = f"was not ready and made no progress for {start_s:g} s"
            if left_s <= 0:
                return reason
            # No longer than the short limit: the process may register meanwhile.
            await asyncio.sleep(min(left_s, silence_s))

    def observe(self) -> bool:
        """Read the members; return whether a stall has started or ended. Raises RunFailed at
        timeouts.stall_s with the sentence, which names which process waits for what and since when.
        """
        members = self._registry.members
        learners = [member for member in members if member.role == "learner"]
        progress = max(((m.version, m.pid) for m in learners), default=(-1, -1))
        now_s = self._registry.clock()
        if progress != self._progress:
            self._progress = progress
            self.since_s = now_s
        before = self.stalled
        stalled_s = now_s - self.since_s
        if stalled_s < self._config.stall_warning_s:
            self.stalled = ""
        elif not before or stalled_s >= self._limit_s:
            unheard_s = self.silent_s()
            self.stalled = sentence(
                members, stalled_s=stalled_s, now_s=time.time(), unheard_s=unheard_s
            )
        if stalled_s >= self._limit_s:
            raise RunFailed(f"{self.stalled} (10 timeouts.start_s = {self._config.stall_s:g} s)")
        return self.stalled != before


def _condition(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    # The pid may vanish between the heartbeat and this line.
    except psutil.Error:
        return "dead"
    return _CONDITIONS.get(status, f"in state {status}").format(pid=pid)


_CHAIN = ("learner", "buffer", "gateway", "generator", "verifier")
"""Each role waits for the next one."""
_NEEDED = ("generator", "verifier")
_MOST_PARTS = 8  # the first ones name the cause; a pool of 100 generators would fill the screen
_AWAY = ("starting", "ended")
_AT_REST = ("ready", "serving")


def sentence(
    members: Sequence[Member], *, stalled_s: float, now_s: float, unheard_s: Mapping[str, float]
) -> str:
    """Return a sentence that lists the silent processes, then which process waits for what and
    since when, the learner first. A working process is listed if its state has not changed for
    more than half of the stall.

    now_s: Unix time, as in heartbeats.
    """
    version = max((m.version for m in members if m.role == "learner"), default=-1)
    problem = "the learner has not started"
    if version >= 0:
        problem = f"no learner step after version {version}"
    # A missing role explains the stall, so it comes first.
    serving = {m.role for m in members if m.state not in _AWAY}
    parts = [f"no {role} serves" for role in _NEEDED if role not in serving]
    # An outage of what scores looks like a wait for a batch; its reason must not be lost.
    failure = commonest_failure(member.counters for member in members)
    parts += [failure] if failure else []
    parts += [
        f"{name} has sent no heartbeat for {duration(silent_s)}"
        for name, silent_s in sorted(unheard_s.items())
    ]
    for member in sorted(members, key=lambda m: (_CHAIN.index(m.role), m.name)):
        if member.name in unheard_s:
            continue
        since_s = now_s - member.since_s
        # A process at work explains a stall only if it has done the same for most of it.
        is_stuck = member.state not in _AT_REST and 2 * since_s > stalled_s
        if member.waits_for:
            parts.append(wait_of(member, now_s))
        elif member.role == "learner" or member.state in _AWAY or is_stuck:
            parts.append(f"{member.name}: {member.state} ({duration(since_s)})")
    if len(parts) > _MOST_PARTS:
        parts[_MOST_PARTS:] = [f"and {len(parts) - _MOST_PARTS} more"]
    return f"{problem} for {duration(stalled_s)}: {'; '.join(parts)}"
