"""The member list as every process follows it, and calls to members by role or name.

A `Peer` is a role or a name, not an address: a call waits until such a process serves, and is sent
again if another process replaces it during the call. Only requests that are safe to send twice use
peers, and every request to the supervisor is.
"""

import asyncio
import collections
import contextlib
import random
import time
from dataclasses import dataclass
from typing import Any, cast

from async_rl.core.errors import DeadlineExceeded, SupervisorLost, Unavailable
from async_rl.core.types import Role
from async_rl.protocol.base import Message
from async_rl.protocol.supervisor import Member, Members, WatchMembers
from async_rl.wire.rpc import Keys, RpcClient

# Many processes call a restarted one; the random pause spreads their calls.
_JITTER_S = 0.1
AGAIN_S = 60.0
"""A request without an answer is sent again: a connection that was cut for longer than ZeroMQ's
heartbeats bridge (30 s) has lost the request or its reply. Above every `wait_s` of a request.
"""
_WATCH_S = 20.0  # a supervisor without news answers after this time


@dataclass(frozen=True)
class SupervisorCalls:
    """Calls the supervisor, again and again for `patience_s` while it does not answer. call_s: for
    each attempt.

    A supervisor that was stopped, or whose machine was suspended, answers later; its children must
    not exit because of that.
    """

    client: RpcClient
    call_s: float
    patience_s: float

    async def call(self, request: Message, *, wait_s: float = 0.0) -> Any:
        """As RpcClient.call. wait_s: the supervisor may take this long to answer. Raises
        SupervisorLost.
        """
        timeout_s = self.call_s + wait_s
        # On top of the first attempt: a request for news may rightly wait longer than that.
        deadline_s = time.monotonic() + timeout_s + self.patience_s
        while True:
            try:
                return await self.client.call(request, timeout_s=timeout_s)
            except DeadlineExceeded as error:
                if time.monotonic() >= deadline_s:
                    raise SupervisorLost(f"{error}, for {self.patience_s:g} s") from error


class Directory:
    """The newest member list. `follow()` keeps it current and wakes the waiters of `changed()`."""

    def __init__(self) -> None:
        self.revision = -1
        self._members: dict[str, Member] = {}
        self._of_role: collections.defaultdict[Role, dict[str, Member]] = collections.defaultdict(
            dict
        )
        self._changed = asyncio.Event()

    @property
    def members(self) -> list[Member]:
        """The processes that serve."""
        return list(self._members.values())

    def update(self, members: Members) -> None:
        """Apply changes to the list, or replace it by a newer one."""
        if members.revision == self.revision:
            return
        # A supervisor that no longer has the changes sends the whole list.
        for name in list(self._members) if members.since < 0 else members.left:
            if name in self._members:
                del self._of_role[self._members.pop(name).role][name]
        for member in members.members:
            self._members[member.name] = self._of_role[member.role][member.name] = member
        self.revision = members.revision
        # Waiters of the old event wake; the new one is for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, known_revision: int) -> None:
        """Return once the revision is no longer `known_revision`."""
        while self.revision == known_revision:
            await self._changed.wait()

    async def changed_or(self, event: asyncio.Event) -> None:
        """Return once the list changes or the event is set."""
        waits = [
            asyncio.create_task(self._changed.wait(), name="directory changed"),
            asyncio.create_task(event.wait(), name="event"),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def of_role(self, role: Role) -> list[Member]:
        """Return the members that serve as `role`, by name."""
        return sorted(self._of_role[role].values(), key=lambda member: member.name)

    def find(self, name_or_role: str) -> Member | None:
        """Return the member with this name, or the first of this role."""
        # The name first: with thousands of members, a search for each call would take milliseconds.
        if name_or_role in self._members:
            return self._members[name_or_role]
        matches = self._of_role.get(cast(Role, name_or_role), {}).values()
        return min(matches, key=lambda member: member.name, default=None)

    async def follow(self, supervisor: SupervisorCalls, roles: frozenset[Role]) -> None:
        """Watch these roles of the supervisor's list until cancelled. Raises SupervisorLost."""
        while True:
            request = WatchMembers(
                known_revision=self.revision, roles=sorted(roles), wait_s=_WATCH_S
            )
            self.update(await supervisor.call(request, wait_s=_WATCH_S))


class _Ended(Unavailable):
    """The process exited before it answered; its successor may be called."""


class Connections:
    """RpcClients by address, opened on first use.

    Clients of processes that left the directory are closed when another one is opened.
    """

    def __init__(self, keys: Keys, directory: Directory) -> None:
        self._keys = keys
        self.directory = directory
        self._clients: dict[str, RpcClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __call__(self, address: str) -> RpcClient:
        """Return the client of this address."""
        if not address.startswith("tcp://"):
            raise Unavailable(f"{address!r} is not a ZeroMQ address")
        client = self._clients.get(address)
        if client is None:
            # Here, because a client of a successor is the usual reason to open one.
            self._close_unlisted()
            client = self._clients[address] = RpcClient(address, self._keys)
        return client

    def _close_unlisted(self) -> None:
        listed = {member.address for member in self.directory.members}
        for address, client in list(self._clients.items()):
            # A draining verifier or generator is unlisted while it still answers.
            if address not in listed and not client.is_busy:
                del self._clients[address]
                closing = asyncio.create_task(client.close(linger_ms=0), name=f"close {address}")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all clients."""
        closing = [client.close() for client in self._clients.values()]
        await asyncio.gather(*self._closing, *closing)
        self._clients.clear()


@dataclass(frozen=True)
class Incarnation:
    """Calls one life of a process, and notices its end."""

    member: Member
    connections: Connections

    async def call(
        self, request: Message, *, timeout_s: float, again_s: float | None = None
    ) -> Any:
        """As RpcClient.call. Raises Unavailable once the process exited or left the member list.

        again_s: send the request again whenever it has waited for so long; the first answer counts.
        """
        member = self.member
        gone = asyncio.create_task(self._gone(), name=f"watch {member.name}")
        calls: list[asyncio.Task[Any]] = []
        done: set[asyncio.Task[Any]] = set()
        try:
            while not done:
                call = self._call(request, timeout_s)
                calls.append(asyncio.create_task(call, name=f"call {member.name}"))
                done, _ = await asyncio.wait(
                    {*calls, gone}, timeout=again_s, return_when=asyncio.FIRST_COMPLETED
                )
            for answered in calls:
                if answered in done:
                    return answered.result()
            raise _Ended(
                f"{member.name} (pid {member.pid}) exited before it answered"
                f" {type(request).__name__}"
            )
        finally:
            for task in (*calls, gone):
                task.cancel()
            await asyncio.gather(*calls, gone, return_exceptions=True)

    async def _call(self, request: Message, timeout_s: float) -> Any:
        # No await between the two: a client without a pending call may be closed.
        return await self.connections(self.member.address).call(request, timeout_s=timeout_s)

    async def _gone(self) -> None:
        directory = self.connections.directory
        while True:
            revision = directory.revision
            now = directory.find(self.member.name)
            # A restarted process may get the port or the pid of its predecessor, not both.
            if now is None or (now.pid, now.address) != (self.member.pid, self.member.address):
                return
            await directory.changed(revision)


@dataclass(frozen=True)
class Peer:
    """Calls the current process with a name or a role."""

    name_or_role: str
    connections: Connections

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """As RpcClient.call, across restarts of the process.

        Raises Unavailable if no such process answers in time.
        """
        directory = self.connections.directory
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    revision = directory.revision
                    member = directory.find(self.name_or_role)
                    if member is None:
                        await directory.changed(revision)
                        continue
                    life = Incarnation(member, self.connections)
                    with contextlib.suppress(_Ended):
                        # Longer than the timeout around it, which names the peer.
                        return await life.call(request, timeout_s=2 * timeout_s, again_s=AGAIN_S)
                    # Otherwise all callers of the old process call its successor in one moment.
                    await asyncio.sleep(random.uniform(0, _JITTER_S))
        except TimeoutError as error:
            state = "did not answer"
            if directory.find(self.name_or_role) is None:
                state = "does not serve"
            raise Unavailable(
                f"{self.name_or_role} {state}: {type(request).__name__} got no reply within"
                f" {timeout_s:g} s"
            ) from error
