"""The supervisor's list of processes: which one serves where, and when its last heartbeat came by a
clock that stops with the supervisor.

Every other process follows `Registry.directory`.
Invariant: a heartbeat costs the same however many processes there are.
"""

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from msgspec.structs import replace

from async_rl.config.pools import pool_of
from async_rl.core.types import Role
from async_rl.observability.activity import GAUGE
from async_rl.protocol.supervisor import (
    DRAINING,
    ENDED,
    READY,
    STARTING,
    Heartbeat,
    Member,
    Members,
    PoolCount,
    Register,
)
from async_rl.runtime.context import PROGRESS, PROGRESS_MB
from async_rl.runtime.directory import Directory

_LONGEST_S = 2.0  # twice the interval at which the supervisor reads it; a busy machine delays that


class AwakeClock:
    """Seconds while this process ran. read: monotonic seconds.

    A process that was stopped, or whose machine was suspended, has not heard its children and must
    not blame them for it. The time between two readings therefore counts as at most `_LONGEST_S`,
    so the clock must be read about once per second.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._last_s = read()
        self._awake_s = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        # A pause shows only as a long time between two readings.
        now_s = self._read()
        self._awake_s += min(now_s - self._last_s, _LONGEST_S)
        self._last_s = now_s
        return self._awake_s


async def in_time(event: Awaitable[object], limit_s: float) -> bool:
    """Wait for the event; return whether it came within the limit."""
    try:
        await asyncio.wait_for(event, limit_s)
    except TimeoutError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class _Entry:
    """heard_s, advanced_s: times of the last heartbeat and of the last progress of a start, by the
    registry's clock. moved_mb: the evidence of that progress.
    """

    member: Member
    heard_s: float
    advanced_s: float
    moved_mb: float = 0.0
    is_serving: bool = False
    is_draining: bool = False


class Registry:
    """Members by name. The revision of `directory` grows when a member starts or stops serving.

    wanted: target number of processes per pool, set by the scaler. work: purpose of the generators
    of each pool. clock: seconds while the supervisor ran.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or AwakeClock()
        self.directory = Directory()
        self.directory.update(Members(revision=0, members=[]))
        self._entries: dict[str, _Entry] = {}
        # By role: the last revision that changed each member, also one that left, in their order.
        # Names are used again, so there are not many more than members.
        self._changes: collections.defaultdict[Role, dict[str, int]] = collections.defaultdict(dict)
        # By the roles that a process follows: a change wakes followers of its role only.
        self._news: collections.defaultdict[frozenset[Role], asyncio.Event] = (
            collections.defaultdict(asyncio.Event)
        )
        self.wanted: dict[str, int] = {}
        self.work: dict[str, str] = {}

    def add(self, name: str, role: Role, pid: int, *, waits_for: str = "") -> None:
        """Add a process that was started, or that waits for resources (pid 0)."""
        self._enter(
            Member(
                name=name,
                role=role,
                pid=pid,
                state=STARTING,
                since_s=time.time(),
                waits_for=waits_for,
            )
        )

    def record_pid(self, name: str, pid: int) -> None:
        """Record the pid of a process that got its resources.

        The process may have registered before the launcher reports its pid.
        """
        # A registration has the pid already; a fresh entry would lose the address.
        if not self.is_serving(name):
            self.add(name, self._entries[name].member.role, pid)

    def register(self, message: Register) -> None:
        """Mark the process as serving at its address."""
        entry = self._enter(
            Member(
                name=message.name,
                role=message.role,
                pid=message.pid,
                address=message.address,
                state=READY,
                since_s=time.time(),
                devices=message.devices,
            )
        )
        entry.is_serving = True
        self._publish(message.name)

    def beat(self, message: Heartbeat) -> None:
        """Update a member from its heartbeat; late heartbeats of a predecessor are ignored."""
        entry = self._entries.get(message.name)
        if entry is None or entry.member.pid != message.pid:
            return
        # Two states that the supervisor knows better than the process.
        state = message.state
        if entry.is_draining:
            state = DRAINING
        elif not entry.is_serving:
            state = STARTING
        entry.heard_s = self.clock()
        moved_mb = message.counters.get(f"{GAUGE}{PROGRESS}", 0.0)
        is_same_stage = message.waits_for == entry.member.waits_for
        # Bytes that a start reads are progress; a start of an hour is fine as long as it reads.
        if abs(moved_mb - entry.moved_mb) >= PROGRESS_MB or not is_same_stage:
            entry.advanced_s = entry.heard_s
            entry.moved_mb = moved_mb
        entry.member = replace(
            entry.member,
            state=state,
            waits_for=message.waits_for,
            since_s=message.since_s,
            version=message.version,
            counters=message.counters,
        )

    def mark_ended(self, name: str) -> None:
        """Mark the process as exited; it may be started again."""
        member = self._entries[name].member
        # A fresh entry: its next life starts without counters, devices and address.
        self._enter(
            Member(name=name, role=member.role, pid=member.pid, state=ENDED, since_s=time.time())
        )
        self._publish(name)

    def drain(self, name: str) -> None:
        """Mark the process as leaving.

        A draining verifier is no longer listed. A draining generator is, because it needs weights
        for the groups that it still generates.
        """
        entry = self._entries.get(name)
        if entry is not None:
            entry.is_draining = True
            entry.member = replace(entry.member, state=DRAINING, since_s=time.time())
            self._publish(name)

    def forget(self, name: str) -> None:
        """Remove a process that has left for good."""
        self._entries.pop(name, None)

    async def news(self, revision: int, roles: frozenset[Role]) -> None:
        """Return once a member of these roles has changed since a revision, or if the revision is
        unknown.
        """
        while 0 <= revision <= self.directory.revision and not any(
            next(reversed(self._changes[role].values()), 0) > revision for role in roles
        ):
            await self._news[roles].wait()

    def changes_since(self, revision: int, roles: frozenset[Role]) -> Members:
        """Return the changes of these roles since a revision, or all their members if unknown."""
        directory = self.directory
        if revision > directory.revision:
            revision = -1
        current: dict[str, Member | None] = {}
        for role in roles:
            for name, last_change in reversed(self._changes[role].items()):
                if last_change <= revision:
                    break
                current[name] = directory.find(name)
        return Members(
            revision=directory.revision,
            since=revision,
            members=[member for member in reversed(current.values()) if member is not None],
            left=[name for name, member in current.items() if member is None],
        )

    def pools(self) -> list[PoolCount]:
        """Return the current counts of each pool; an exited process counts as starting."""
        by_pool: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        for member in self.members:
            by_pool[pool_of(member.name)].append(member.state)
        counts = []
        for pool, wanted in self.wanted.items():
            states = by_pool[pool]
            draining = states.count(DRAINING)
            starting = states.count(STARTING) + states.count(ENDED)
            counts.append(
                PoolCount(
                    pool=pool,
                    wanted=wanted,
                    starting=starting,
                    live=len(states) - draining - starting,
                    draining=draining,
                    work=self.work.get(pool, ""),
                )
            )
        return counts

    def is_serving(self, name: str) -> bool:
        """Return whether the process has registered and has not exited."""
        return name in self._entries and self._entries[name].is_serving

    def quiet_s(self, name: str) -> float:
        """Return the seconds since the last heartbeat of the process."""
        return self.clock() - self._entries[name].heard_s

    def stuck_s(self, name: str) -> float:
        """Return the seconds since the process was started or last made progress."""
        return self.clock() - self._entries[name].advanced_s

    def __len__(self) -> int:
        """The number of processes, serving or not."""
        return len(self._entries)

    @property
    def members(self) -> list[Member]:
        """All processes, serving or not, in order of their start."""
        return [entry.member for entry in self._entries.values()]

    def _enter(self, member: Member) -> _Entry:
        before = self._entries.get(member.name)
        now_s = self.clock()
        entry = _Entry(member=member, heard_s=now_s, advanced_s=now_s)
        # A process that is to leave still leaves when it gets its resources or registers late.
        if before is not None:
            entry.is_draining = before.is_draining
        self._entries[member.name] = entry
        return entry

    def _publish(self, name: str) -> None:
        """Put one process on the list of other processes or remove it, if that is a change."""
        entry = self._entries[name]
        is_listed = entry.is_serving and not (entry.is_draining and entry.member.role == "verifier")
        before = self.directory.find(name)
        if before is None and not is_listed:
            return
        # Counters are most of a member and of no use to others.
        members = [replace(entry.member, counters={})] if is_listed else []
        # Names only: a process that missed several changes of one member gets its present state
        # once.
        role = entry.member.role
        revision = self.directory.revision + 1
        self._changes[role].pop(name, None)
        self._changes[role][name] = revision
        left = [] if is_listed else [name]
        self.directory.update(
            Members(revision=revision, since=revision - 1, members=members, left=left)
        )
        for roles in [roles for roles in self._news if role in roles]:
            self._news.pop(roles).set()
