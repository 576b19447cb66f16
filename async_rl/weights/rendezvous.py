"""Where the ranks of a broadcast meet: a small store that the learner serves, and one rank's access
to it as a store of torch.

Invariants
- Every request and reply is encrypted and authenticated (CURVE) with a secret that only seats
  contain. A seat is part of an authenticated push, so nobody else lists, reads or writes a key: the
  addresses of gloo, the id of NCCL, and the connections that weights/gate.py admits.
- A value belongs to one communicator and is refused in every other. The first value of a key stays.
- Ranks that have all met connect, whoever is lost meanwhile: connecting cannot be called off, and
  has no deadline with NCCL.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from async_rl.core.closing import LoopThread
from async_rl.core.errors import BroadcastBroken
from async_rl.protocol.base import Message
from async_rl.protocol.weights import Found, LookUp, Put, Seat, Written
from async_rl.wire.rpc import Handler, RpcClient, RpcServer, derived_keys

_PRESENT = "present"
_VERDICT = "verdict"
_ALL = b"all"
_LOST = b"lost"
LOOK_S = 5.0
"""A rank asks again after this time, so that it notices the end of the learner."""
ANSWER_S = 15.0
"""The server answers immediately, apart from the time that a request waits for other ranks."""


class Rendezvous:
    """The learner's side: a server in a thread of its own, at this address only."""

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex()
        # By communicator and key, in the order in which they were written.
        self.values: dict[str, dict[str, list[bytes]]] = {}
        self._thread = LoopThread("rendezvous")
        self.address = self._thread.run(self._serve(host))

    def open(self, communicator: str) -> None:
        """Let ranks meet under a new name."""
        self.values[communicator] = {}

    def call_off(self, communicator: str) -> None:
        """Let all ranks give up that wait for this communicator, now or later, unless all have met:
        then they connect.
        """
        self._thread.run(self._put(Put(communicator=communicator, key=_VERDICT, value=_LOST)))

    def close(self) -> None:
        """Close the server."""
        self._thread.run(self._end())
        self._thread.close()

    async def _serve(self, host: str) -> str:
        handlers: dict[type[Message], Handler] = {Put: self._put, LookUp: self._look_up}
        self._changed = asyncio.Condition()
        self._server = RpcServer(host, 0, derived_keys(self.secret), handlers)
        self._serving = asyncio.create_task(self._server.serve(), name="rendezvous")
        return self._server.address

    async def _end(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._server.close()

    async def _put(self, request: Put) -> Written:
        values = self._of(request.communicator).setdefault(request.key, [])
        async with self._changed:
            values.append(request.value)
            self._changed.notify_all()
        return Written(number=len(values))

    async def _look_up(self, request: LookUp) -> Found:
        values = self._of(request.communicator)
        try:
            async with asyncio.timeout(request.wait_s), self._changed:
                await self._changed.wait_for(lambda: all(key in values for key in request.keys))
        except TimeoutError:
            return Found(values=None)
        return Found(values=[values[key][0] for key in request.keys])

    def _of(self, communicator: str) -> dict[str, list[bytes]]:
        if communicator not in self.values:
            raise BroadcastBroken(f"there is no communicator {communicator}")
        return self.values[communicator]


class SeatStore(dist.Store):  # type: ignore[name-defined,misc]
    """The values of one communicator, for one rank. It has the methods of torch's stores, called
    from threads of torch too; each raises AsyncRLError or RuntimeError if it fails.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self._seat = seat
        self._thread = LoopThread("rendezvous")
        self._client = self._thread.run(_connect(seat))

    def meet(self) -> None:
        """Return once all ranks are here. Raises BroadcastBroken if they will not come."""
        if self.add(_PRESENT, 1) == self._seat.world_size:
            self.set(_VERDICT, _ALL)
        if self.get(_VERDICT) != _ALL:
            raise BroadcastBroken("the load was cancelled because a member was lost")

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        self._put(key, value if isinstance(value, bytes) else value.encode())

    def add(self, key: str, amount: int) -> int:
        """Count up, from 0, and return the number. amount: 1."""
        return self._put(key, b"")

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        return self._wait([key], self._seat.timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once the keys have values."""
        self._wait(keys, timeout.total_seconds() if timeout else self._seat.timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the keys have values."""
        return self._look_up(keys, 0.0) is not None

    def close(self) -> None:
        """Close the connection."""
        self._thread.run(self._client.close())
        self._thread.close()

    def _wait(self, keys: Sequence[str], wait_s: float) -> list[bytes]:
        deadline_s = time.monotonic() + wait_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            values = self._look_up(keys, min(left_s, LOOK_S))
            if values is not None:
                return values
        raise RuntimeError(f"no other rank wrote {', '.join(keys)} within {wait_s:g} s")

    def _put(self, key: str, value: bytes) -> int:
        request = Put(communicator=self._seat.communicator, key=key, value=value)
        written: Written = self._call(request, 0.0)
        return written.number

    def _look_up(self, keys: Sequence[str], wait_s: float) -> list[bytes] | None:
        name = self._seat.communicator
        found: Found = self._call(LookUp(communicator=name, keys=list(keys), wait_s=wait_s), wait_s)
        return found.values

    def _call(self, request: Message, wait_s: float) -> Any:
        return self._thread.run(self._client.call(request, timeout_s=wait_s + ANSWER_S))


async def _connect(seat: Seat) -> RpcClient:
    return RpcClient(seat.store, derived_keys(seat.secret))
