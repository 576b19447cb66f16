"""Connections inside the world, behind the interface of async_rl/wire/rpc.py.

As over TCP, the messages of one connection and direction keep their order. A message is late by a
random time; while a link is cut it waits, and is lost if the cut takes longer than ZeroMQ keeps the
connection. Messages are encoded and decoded as on the real wire.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from loop import Process, VirtualLoop, current

from async_rl.core.codec import encode
from async_rl.core.errors import DeadlineExceeded, Unavailable
from async_rl.protocol.base import Message
from async_rl.wire.rpc import Handler, Handlers, reply_of

DELAY_S = 0.002
KEPT_S = 30.0
"""The time for which a connection survives a cut link; as async_rl/wire/rpc.py sets ZeroMQ."""


@dataclass
class Armed:
    """A fault that waits for a message of a type. moment: sent, arrived, answered or returned.
    number: of such messages until then. strike: receives the client's and the server's process.
    """

    kind: str
    moment: str
    number: int
    strike: Callable[[Process, Process], None]


@dataclass
class Network:
    """All links. cut: (from, to) names of processes whose messages do not arrive, with the time of
    the cut. repeat: the share of requests that arrive twice. on_call: sees each request that was
    answered, with the process that did, its reply and the time when it was sent. ports: by file,
    the address of its HTTP server and the process.
    """

    loop: VirtualLoop
    rng: random.Random
    repeat: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    cut: dict[tuple[str, str], float] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    sites: dict[str, Any] = field(default_factory=dict)
    ports: dict[Path, tuple[str, Process]] = field(default_factory=dict)
    on_call: Callable[[Process, Message, Any, float, float], None] = lambda *_: None
    # By id: requests that have no answer yet, and when each was first sent.
    made: dict[int, tuple[Message, float]] = field(default_factory=dict)
    armed: list[Armed] = field(default_factory=list)
    _ports: Any = field(default_factory=lambda: itertools.count(20_000))
    _waiting: list[tuple[tuple[str, str], Callable[[], None]]] = field(default_factory=list)
    # The network's own context: messages arrive although their sender has been killed.
    _context: contextvars.Context = field(default_factory=contextvars.Context)

    def address(self) -> str:
        return f"tcp://127.0.0.1:{next(self._ports)}"

    def send(
        self, link: tuple[str, str], not_before_s: float, deliver: Callable[[], None]
    ) -> float:
        """Deliver a message; return its time of arrival."""
        if link in self.cut:
            self._waiting.append((link, deliver))
            return not_before_s
        slow_s = self.slow.get(link[0], 0.0) + self.slow.get(link[1], 0.0)
        late_s = self.rng.expovariate(1 / DELAY_S) + slow_s
        at_s = max(not_before_s, self.loop.time() + late_s)
        self.loop.call_at(at_s, deliver, context=self._context)
        return at_s

    def passes(self, moment: str, request: Message, client: Process, server: Process) -> None:
        """A message is on its way; cause what waits for it, once the present callback has ended."""
        kind = type(request).__name__
        for armed in [a for a in self.armed if (a.kind, a.moment) == (kind, moment)]:
            armed.number -= 1
            if armed.number == 0:
                self.armed.remove(armed)
                self.loop.call_next(functools.partial(armed.strike, client, server))

    def heal(self, link: tuple[str, str]) -> None:
        """Let messages pass again; those of a connection that has broken meanwhile are lost."""
        cut_s = self.cut.pop(link, None)
        if cut_s is None:
            return
        waiting = [deliver for of, deliver in self._waiting if of == link]
        self._waiting = [item for item in self._waiting if item[0] != link]
        if self.loop.time() - cut_s < KEPT_S:
            for deliver in waiting:
                self.loop.call_soon(deliver, context=self._context)


class Server:
    """As RpcServer."""

    network: Network

    def __init__(
        self,
        host: str,
        port: int,
        keys: object,
        handlers: Mapping[type[Message], Handler],
        *,
        gather_s: float = 0.0,
    ) -> None:
        self._handlers = Handlers(handlers)
        self.process = current()
        self._requests: asyncio.Queue[tuple[bytes, Callable[[bytes], None]]] = asyncio.Queue()
        self.address = self.network.address()
        self.network.servers[self.address] = self

    def arrive(self, payload: bytes, answer: Callable[[bytes], None]) -> None:
        """A request has arrived."""
        if not self.process.is_dead:
            self._requests.put_nowait((payload, answer))

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                payload, answer = await self._requests.get()
                group.create_task(self._answer(payload, answer), name="rpc handler")

    async def _answer(self, payload: bytes, answer: Callable[[bytes], None]) -> None:
        answer(await self._handlers.answer(payload))

    def close(self) -> None:
        self.network.servers.pop(self.address, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """As RpcClient."""

    network: Network

    def __init__(self, address: str, keys: object, *, context: object = None) -> None:
        self.address = address
        self._process = current()
        # Of the newest request: all requests of a connection have the same.
        self._receiver = self._process
        self._pending: set[asyncio.Future[bytes]] = set()
        self._arrival_s = 0.0

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        sent_s = asyncio.get_running_loop().time()
        # A caller sends the same request again to a process that has started again.
        _, made_s = self.network.made.setdefault(id(request), (request, sent_s))
        try:
            async with asyncio.timeout(timeout_s):
                self._send(request, future)
                payload = await future
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.address} did not answer {type(request).__name__} within {timeout_s:g} s"
            ) from error
        finally:
            self._pending.discard(future)
        reply = reply_of(request, payload, self.address)
        self.network.made.pop(id(request), None)
        self.network.passes("returned", request, self._process, self._receiver)
        self.network.on_call(self._receiver, request, reply, sent_s, made_s)
        return reply

    def _send(self, request: Message, future: asyncio.Future[bytes]) -> None:
        network = self.network
        payload = encode(request)
        server = network.servers.get(self.address)
        if server is None:
            return  # nobody listens: ZeroMQ keeps trying, and the call has a deadline
        self._receiver = server.process
        times = 2 if network.rng.random() < network.repeat else 1
        link = (self._process.name, server.process.name)
        passes = functools.partial(
            network.passes, request=request, client=self._process, server=server.process
        )
        back_s = 0.0

        def ask() -> None:
            passes("arrived")
            server.arrive(payload, reply)

        def reply(content: bytes) -> None:
            nonlocal back_s
            if not server.process.is_dead:
                passes("answered")
                back_s = network.send(link[::-1], back_s, functools.partial(arrive, content))

        def arrive(content: bytes) -> None:
            if not (self._process.is_dead or future.done()):
                future.set_result(content)

        passes("sent")
        for _ in range(times):
            self._arrival_s = network.send(link, self._arrival_s, ask)

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    async def close(self, *, linger_ms: int = 0) -> None:
        for future in self._pending:
            if not future.done():
                future.set_exception(Unavailable(f"the connection to {self.address} was closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
