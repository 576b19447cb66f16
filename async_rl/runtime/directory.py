"""Who serves where: each process follows the supervisor's list of members and reaches its peers
through it.

A `Peer` stands for a role or a name, not for an address: a call waits until such a process serves,
and is sent again if the process is replaced by another while the call is out.  Only requests that
are safe to send twice go through peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from async_rl.core.errors import Unavailable
from async_rl.core.types import Role
from async_rl.protocol.base import Message
from async_rl.protocol.membership import Member, Members, WatchMembers
from async_rl.wire.keys import Keys
from async_rl.wire.rpc import RpcClient

_JITTER_S = 0.1
_WATCH_S = 20.0  # a supervisor that says nothing for this long is asked anew


class Directory:
    """The members as last told by the supervisor. `follow()` keeps it current and wakes those who
    wait in `changed()`.
    """

    def __init__(self) -> None:
        self.revision = -1
        self.members: list[Member] = []
        self._changed = asyncio.Event()

    def update(self, members: Members) -> None:
        """Takes a newer list and wakes everyone who waits for one."""
        if members.revision != self.revision:
            self.revision, self.members = members.revision, members.members
            self._changed.set()
            self._changed = asyncio.Event()

    def snapshot(self) -> Members:
        """The list as a message."""
        return Members(revision=self.revision, members=self.members)

    async def changed(self, known_revision: int) -> None:
        """Returns once the revision is no longer `known_revision`."""
        while self.revision == known_revision:
            await self._changed.wait()

    async def changed_or(self, event: asyncio.Event) -> None:
        """Returns once the list changes or the event is set."""
        waits = {
            asyncio.create_task(self._changed.wait(), name="directory changed"),
            asyncio.create_task(event.wait(), name="event"),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def of_role(self, role: Role) -> list[Member]:
        """Members that serve as `role`, by name."""
        return sorted((m for m in self.members if m.role == role), key=lambda m: m.name)

    def find(self, who: str) -> Member | None:
        """The member called `who`, or the first of the role `who`."""
        return next(
            (m for m in sorted(self.members, key=lambda m: m.name) if who in (m.name, m.role)), None
        )

    async def follow(self, supervisor: RpcClient, *, call_timeout_s: float) -> None:
        """Watches the supervisor's list until cancelled. Raises DeadlineExceeded if it does not
        answer.
        """
        while True:
            request = WatchMembers(known_revision=self.revision, wait_s=_WATCH_S)
            self.update(await supervisor.call(request, timeout_s=_WATCH_S + call_timeout_s))


class _Ended(Unavailable):
    """The process that was called is gone; its successor may be asked."""


class Incarnation:
    """Calls one life of a process, and knows when it is over."""

    def __init__(
        self, member: Member, directory: Directory, connect: Callable[[str], RpcClient]
    ) -> None:
        self._member = member
        self._directory = directory
        self._connect = connect

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """As RpcClient.call. Raises Unavailable as soon as the process no longer serves at its
        address.
        """
        member = self._member
        call = asyncio.create_task(self._call(request, timeout_s), name=f"call {member.name}")
        gone = asyncio.create_task(self._gone(), name=f"watch {member.name}")
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise _Ended(
                    f"{member.name} (pid {member.pid}) ended before it answered"
                    f" {type(request).__name__}"
                )
            return call.result()
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _call(self, request: Message, timeout_s: float) -> Any:
        """In one stretch from the client to its pending call: one that nobody calls may be closed
        at any moment.
        """
        return await self._connect(self._member.address).call(request, timeout_s=timeout_s)

    async def _gone(self) -> None:
        while True:
            revision = self._directory.revision
            now = self._directory.find(self._member.name)
            if now is None or (now.pid, now.address) != (self._member.pid, self._member.address):
                return
            await self._directory.changed(revision)


class Peer:
    """Calls whoever is `who` (a name or a role) at the moment."""

    def __init__(self, who: str, directory: Directory, connect: Callable[[str], RpcClient]) -> None:
        self._who = who
        self._directory = directory
        self._connect = connect

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """As RpcClient.call, following the process across restarts. Raises Unavailable if nobody
        serves as `who` in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    revision = self._directory.revision
                    member = self._directory.find(self._who)
                    if member is None:
                        await self._directory.changed(revision)
                        continue
                    with contextlib.suppress(
                        _Ended
                    ):  # its next life is asked again, not by all at the same moment
                        return await Incarnation(member, self._directory, self._connect).call(
                            request, timeout_s=2 * timeout_s
                        )
                    await asyncio.sleep(random.uniform(0, _JITTER_S))
        except TimeoutError as error:
            state = "is not there" if self._directory.find(self._who) is None else "did not answer"
            raise Unavailable(
                f"{self._who} {state}: {type(request).__name__} got no reply within {timeout_s:g} s"
            ) from error


class Connections:
    """RpcClients by address, opened on first use and closed together. directory: whoever left it is
    not kept connected.
    """

    def __init__(self, keys: Keys, directory: Directory) -> None:
        self._keys = keys
        self._directory = directory
        self._clients: dict[str, RpcClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __call__(self, address: str) -> RpcClient:
        """The client of this address."""
        if not address.startswith("tcp://"):
            raise Unavailable(f"{address!r} is not a ZeroMQ address")
        client = self._clients.get(address)
        if client is None:
            self._forget_who_left()
            client = self._clients[address] = RpcClient(address, self._keys)
            client.start()
        return client

    def _forget_who_left(self) -> None:
        served = {member.address for member in self._directory.members}
        for address in [
            a for a, client in self._clients.items() if a not in served and not client.is_busy
        ]:
            closing = asyncio.create_task(
                self._clients.pop(address).close(linger_ms=0), name=f"close {address}"
            )
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all of them."""
        await asyncio.gather(*self._closing, *(client.close() for client in self._clients.values()))
        self._clients.clear()
