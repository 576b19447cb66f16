"""The supervisor's list of processes: who serves where, who was heard of when. The source of every
other process's directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from async_rl.config.pools import pool_of
from async_rl.core.types import PoolCount, Role
from async_rl.protocol.membership import Heartbeat, Member, Members, Register
from async_rl.runtime.directory import Directory


@dataclass
class _Entry:
    member: Member
    heard_s: float  # monotonic
    is_serving: bool
    is_draining: bool = False


STARTING, DRAINING, _ENDED = "starting", "draining", "ended"


class Registry:
    """Members by name. The revision of `directory` grows when a member begins or ends to serve.

    wanted: processes per pool that there should be, as the scaler says.  work: what the generators
    of a pool write.
    """

    def __init__(self) -> None:
        self.directory = Directory()
        self.directory.update(Members(revision=0, members=[]))
        self._entries: dict[str, _Entry] = {}
        self.wanted: dict[str, int] = {}
        self.work: dict[str, str] = {}

    def add(self, name: str, role: Role, pid: int, *, waits_for: str = "") -> None:
        """A process was started, or waits for a place (pid 0); it does not serve yet."""
        member = _member(name, role, pid, "", STARTING, waits_for=waits_for)
        self._entries[name] = _Entry(
            member, time.monotonic(), is_serving=False, is_draining=self._is_draining(name)
        )

    def place(self, name: str, pid: int) -> None:
        """The process has a place and starts there. One that serves already was quicker than the
        launcher's word.
        """
        if not self.is_serving(name):
            self.add(name, self._entries[name].member.role, pid)

    def register(self, message: Register) -> None:
        """The process serves at its address from now on."""
        self._entries[message.name] = _Entry(
            _member(
                message.name,
                message.role,
                message.pid,
                message.address,
                "ready",
                devices=message.devices,
            ),
            time.monotonic(),
            is_serving=True,
            is_draining=self._is_draining(message.name),
        )
        self._publish()

    def beat(self, message: Heartbeat) -> None:
        """The process lives; late beats of a predecessor are ignored."""
        entry = self._entries.get(message.name)
        if entry is None or entry.member.pid != message.pid:
            return
        entry.heard_s = time.monotonic()
        old = entry.member
        entry.member = Member(
            name=old.name,
            role=old.role,
            pid=old.pid,
            address=old.address,
            state=(
                DRAINING if entry.is_draining else message.state if entry.is_serving else STARTING
            ),
            waits_for=message.waits_for,
            since_s=message.since_s,
            version=message.version,
            counters=message.counters,
            devices=old.devices,
        )

    def mark(self, name: str, state: str) -> None:
        """The process ended or is between two lives: it no longer serves, and `state` says why."""
        entry = self._entries.get(name)
        if entry is not None:
            self._entries[name] = _Entry(
                _member(name, entry.member.role, entry.member.pid, "", state),
                time.monotonic(),
                is_serving=False,
            )
            if entry.is_serving:
                self._publish()

    def drain(self, name: str) -> None:
        """The process is to leave. A verifier is told to nobody any more; a generator gets weights
        for what it still writes.
        """
        entry = self._entries.get(name)
        if entry is not None:
            entry.is_draining = True
            entry.member = msgspec.structs.replace(
                entry.member, state=DRAINING, since_s=time.time()
            )
            self._publish()

    def forget(self, name: str) -> None:
        """The process has left for good."""
        self._entries.pop(name, None)

    def pools(self) -> list[PoolCount]:
        """Each pool as it is now. One that has ended and will be started again counts as starting."""
        found = []
        for pool, wanted in self.wanted.items():
            states = [member.state for member in self.members if pool_of(member.name) == pool]
            draining = states.count(DRAINING)
            starting = states.count(STARTING) + states.count(_ENDED)
            live = len(states) - draining - starting
            work = self.work.get(pool, "")
            found.append(
                PoolCount(
                    pool=pool,
                    wanted=wanted,
                    starting=starting,
                    live=live,
                    draining=draining,
                    work=work,
                )
            )
        return found

    def _is_draining(self, name: str) -> bool:
        return name in self._entries and self._entries[name].is_draining

    def is_serving(self, name: str) -> bool:
        """True from registration until `mark`."""
        return name in self._entries and self._entries[name].is_serving

    def quiet_s(self, name: str) -> float:
        """Seconds since the process was heard of."""
        return time.monotonic() - self._entries[name].heard_s

    def unheard_s(self, least_s: float) -> dict[str, float]:
        """Those that serve and were not heard of for at least so long: for how long."""
        now_s = time.monotonic()
        return {
            name: now_s - e.heard_s
            for name, e in self._entries.items()
            if e.is_serving and now_s - e.heard_s >= least_s
        }

    async def until_silent(
        self, name: str, *, start_timeout_s: float, heartbeat_timeout_s: float
    ) -> str:
        """Returns, with the reason, once the process failed to serve within its start time or
        stopped beating.
        """
        started_s = time.monotonic()
        while True:
            entry = self._entries[name]
            limit_s = (
                entry.heard_s + heartbeat_timeout_s
                if entry.is_serving
                else started_s + start_timeout_s
            )
            left_s = limit_s - time.monotonic()
            if left_s <= 0:
                return (
                    f"was not heard of for {heartbeat_timeout_s:g} s"
                    if entry.is_serving
                    else f"was not ready after {start_timeout_s:g} s"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    # From the moment it serves another limit holds.
                    await (
                        asyncio.sleep(left_s)
                        if entry.is_serving
                        else self.directory.changed(self.directory.revision)
                    )

    @property
    def members(self) -> list[Member]:
        """All processes, serving or not, in order of their start."""
        return [entry.member for entry in self._entries.values()]

    def _publish(self) -> None:
        entries = [entry for entry in self._entries.values() if entry.is_serving]
        serving = [
            entry.member
            for entry in entries
            if not (entry.is_draining and entry.member.role == "verifier")
        ]
        self.directory.update(Members(revision=self.directory.revision + 1, members=serving))


def _member(
    name: str,
    role: Role,
    pid: int,
    address: str,
    state: str,
    *,
    waits_for: str = "",
    devices: Sequence[str] = (),
) -> Member:
    return Member(
        name=name,
        role=role,
        pid=pid,
        address=address,
        state=state,
        waits_for=waits_for,
        since_s=time.time(),
        version=-1,
        counters={},
        devices=list(devices),
    )
