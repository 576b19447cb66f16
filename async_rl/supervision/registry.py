"""The supervisor's list of processes: which one serves where, and when its last heartbeat came.

Every other process follows `Registry.directory`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec.structs import replace

from async_rl.config.pools import pool_of
from async_rl.core.types import PoolCount, Role
from async_rl.protocol.membership import (
    DRAINING,
    ENDED,
    READY,
    STARTING,
    Heartbeat,
    Member,
    Members,
    Register,
)
from async_rl.runtime.directory import Directory


@dataclass(slots=True, kw_only=True)
class _Entry:
    """heard_s: monotonic time of the last heartbeat."""

    member: Member
    heard_s: float
    is_serving: bool = False
    is_draining: bool = False


class Registry:
    """Members by name. The revision of `directory` grows when a member begins or ends to serve.

    wanted: target number of processes per pool, set by the scaler. work: purpose of the generators
    of each pool.
    """

    def __init__(self) -> None:
        self.directory = Directory()
        self.directory.update(Members(revision=0, members=[]))
        self._entries: dict[str, _Entry] = {}
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

    def place(self, name: str, pid: int) -> None:
        """Record the pid of a process that got its resources.

        The process may have registered before the launcher reports its pid.
        """
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
        self._publish()

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
        entry.heard_s = time.monotonic()
        entry.member = replace(
            entry.member,
            state=state,
            waits_for=message.waits_for,
            since_s=message.since_s,
            version=message.version,
            counters=message.counters,
        )

    def mark_ended(self, name: str) -> None:
        """Mark the process as ended; it may be started again."""
        entry = self._entries.get(name)
        if entry is None:
            return
        was_serving = entry.is_serving
        member = entry.member
        ended = Member(
            name=name, role=member.role, pid=member.pid, state=ENDED, since_s=time.time()
        )
        # A fresh entry: its next life starts without counters, devices and address.
        self._entries[name] = _Entry(member=ended, heard_s=time.monotonic())
        # Other processes know only members that serve.
        if was_serving:
            self._publish()

    def drain(self, name: str) -> None:
        """Mark the process as leaving.

        A draining verifier is no longer listed. A draining generator is, because it needs weights
        for the groups that it still generates.
        """
        entry = self._entries.get(name)
        if entry is not None:
            entry.is_draining = True
            entry.member = replace(entry.member, state=DRAINING, since_s=time.time())
            self._publish()

    def forget(self, name: str) -> None:
        """Remove a process that has left for good."""
        self._entries.pop(name, None)

    def pools(self) -> list[PoolCount]:
        """Return the current counts of each pool; an ended process counts as starting."""
        counts = []
        for pool, wanted in self.wanted.items():
            states = [member.state for member in self.members if pool_of(member.name) == pool]
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
        """Return whether the process has registered and has not ended."""
        return name in self._entries and self._entries[name].is_serving

    def quiet_s(self, name: str) -> float:
        """Return the seconds since the last heartbeat of the process."""
        return time.monotonic() - self._entries[name].heard_s

    @property
    def members(self) -> list[Member]:
        """All processes, serving or not, in order of their start."""
        return [entry.member for entry in self._entries.values()]

    def _enter(self, member: Member) -> _Entry:
        before = self._entries.get(member.name)
        entry = _Entry(member=member, heard_s=time.monotonic())
        # A process that is to leave still leaves when it gets its resources or registers late.
        if before is not None:
            entry.is_draining = before.is_draining
        self._entries[member.name] = entry
        return entry

    def _publish(self) -> None:
        serving = [
            entry.member
            for entry in self._entries.values()
            if entry.is_serving and not (entry.is_draining and entry.member.role == "verifier")
        ]
        self.directory.update(Members(revision=self.directory.revision + 1, members=serving))
