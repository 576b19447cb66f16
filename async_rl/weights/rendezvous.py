"""Where the ranks of a broadcast meet: a small store that the learner serves, and one rank's access
to it as a store of torch.

Invariants
- Every request and reply is encrypted and authenticated (CURVE) with a secret that only seats
  contain. A seat is part of an authenticated push, so nobody else lists, reads or writes a key: the
  addresses of gloo, the id of NCCL, and the connections that weights/gate.py admits.
- A value belongs to one communicator and is refused in every other.
- Ranks that have all met connect, whoever is lost meanwhile: connecting cannot be called off, and
  has no deadline with NCCL.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from async_rl.core.errors import BroadcastBroken
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.weights import Count, Counted, Found, LookUp, Meet, Put, Seat
from async_rl.wire.keys import derived_keys
from async_rl.wire.rpc import Handler, RpcClient, RpcServer

T = TypeVar("T")

_ANSWER_S = 30.0
"""The server answers immediately, apart from the time that a request waits for other ranks."""


class _LoopThread:
    """An event loop in a thread of its own, for callers that block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rendezvous", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Meeting:
    """The ranks of one communicator, and the values that they share."""

    def __init__(self, world_size: int) -> None:
        self.num_missing = world_size
        self.is_off = False
        self.values: dict[str, bytes] = {}
        self.changed = asyncio.Condition()


class Rendezvous:
    """The learner's side: a server in a thread of its own, at this address only."""

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_hex()
        self._meetings: dict[str, _Meeting] = {}
        self._thread = _LoopThread()
        self.address = self._thread.run(self._serve(host))

    def open(self, communicator: str, world_size: int) -> None:
        """Let so many ranks meet under a new name."""

        async def add() -> None:
            self._meetings[communicator] = _Meeting(world_size)

        self._thread.run(add())

    def call_off(self, communicator: str) -> None:
        """Let all ranks give up that wait for this communicator, now or later, unless all have met:
        then they connect.
        """

        async def end() -> None:
            meeting = self._meetings[communicator]
            async with meeting.changed:
                meeting.is_off = meeting.num_missing > 0
                meeting.changed.notify_all()

        self._thread.run(end())

    def close(self) -> None:
        """Close the server."""
        self._thread.run(self._end())
        self._thread.close()

    async def _serve(self, host: str) -> str:
        handlers: dict[type[Message], Handler] = {}
        handlers |= {Meet: self._meet, Put: self._put, LookUp: self._look_up, Count: self._count}
        self._server = RpcServer(host, 0, derived_keys(self.secret), handlers)
        self._serving = asyncio.create_task(self._server.serve(), name="rendezvous")
        return self._server.address

    async def _end(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._server.close()

    async def _meet(self, request: Meet) -> Ok:
        meeting = self._meeting(request)
        async with meeting.changed:
            meeting.num_missing -= 1
            meeting.changed.notify_all()
            await meeting.changed.wait_for(lambda: meeting.is_off or meeting.num_missing <= 0)
        if meeting.is_off:
            raise BroadcastBroken("the load was cancelled because a member was lost")
        return Ok()

    async def _put(self, request: Put) -> Ok:
        meeting = self._meeting(request)
        async with meeting.changed:
            meeting.values[request.key] = request.value
            meeting.changed.notify_all()
        return Ok()

    async def _look_up(self, request: LookUp) -> Found:
        meeting = self._meeting(request)
        values = meeting.values
        try:
            async with asyncio.timeout(request.wait_s), meeting.changed:
                await meeting.changed.wait_for(lambda: all(key in values for key in request.keys))
        except TimeoutError:
            return Found(values=None)
        return Found(values=[values[key] for key in request.keys])

    async def _count(self, request: Count) -> Counted:
        values = self._meeting(request).values
        number = int(values.get(request.key, b"0")) + request.amount
        values[request.key] = b"%d" % number
        return Counted(number=number)

    def _meeting(self, request: Meet | Put | LookUp | Count) -> _Meeting:
        if request.communicator not in self._meetings:
            raise BroadcastBroken(f"there is no communicator {request.communicator}")
        return self._meetings[request.communicator]


class SeatStore(dist.Store):  # type: ignore[name-defined,misc]
    """The values of one communicator, for one rank. Its methods are those of torch's stores, called
    from threads of torch too; each raises AsyncRLError or RuntimeError if it fails.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self._communicator = seat.communicator
        self._timeout_s = seat.timeout_s
        # torch reads each value right after it has waited for it: one request for both.
        self._fetched: dict[str, bytes] = {}
        self._thread = _LoopThread()
        self._thread.run(self._connect(seat))

    def meet(self) -> None:
        """Return once all ranks are here. Raises BroadcastBroken if they will not come."""
        self._call(Meet(communicator=self._communicator), self._timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value."""
        data = value if isinstance(value, bytes) else value.encode()
        self._call(Put(communicator=self._communicator, key=key, value=data))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        if key not in self._fetched:
            self.wait([key])
        return self._fetched.pop(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once the keys have values."""
        wait_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._fetch(keys, wait_s):
            raise RuntimeError(f"no other rank wrote {', '.join(keys)} within {wait_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the keys have values."""
        return self._fetch(keys, 0.0)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return it."""
        counted = self._call(Count(communicator=self._communicator, key=key, amount=amount))
        return int(counted.number)

    def close(self) -> None:
        """Close the connection."""
        self._thread.run(self._leave())
        self._thread.close()

    def _fetch(self, keys: Sequence[str], wait_s: float) -> bool:
        request = LookUp(communicator=self._communicator, keys=list(keys), wait_s=wait_s)
        found: Found = self._call(request, wait_s)
        if found.values is not None:
            self._fetched |= dict(zip(keys, found.values, strict=True))
        return found.values is not None

    def _call(self, request: Message, wait_s: float = 0.0) -> Any:
        return self._thread.run(self._answer(request, wait_s + _ANSWER_S))

    async def _connect(self, seat: Seat) -> None:
        self._client = RpcClient(seat.store, derived_keys(seat.secret))
        self._end = asyncio.create_task(self._client.lost(), name="end of the learner")

    async def _answer(self, request: Message, timeout_s: float) -> Any:
        call = asyncio.create_task(self._client.call(request, timeout_s=timeout_s))
        # A learner that was killed answers nothing, and the next one waits for this rank.
        await asyncio.wait({call, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            raise BroadcastBroken("the learner has ended, or its connection was cut")
        return call.result()

    async def _leave(self) -> None:
        self._end.cancel()
        await asyncio.wait([self._end])
        await self._client.close()
