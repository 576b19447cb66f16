"""Requests and replies over ZeroMQ: ROUTER servers, DEALER clients, CURVE on both, typed
MessagePack inside.

Frames: [request id (8 bytes), payload].  The payload of a request is one message of the server's
handler table, the payload of a reply is the request's `Reply` or a `Failure`. Invariants
- Every call has a deadline.  A reply that arrives after it is dropped.
- A handler that raises an AsyncRLError answers with Failure and the caller gets the same class; any
  other exception ends the process.
- Handlers of one server run concurrently, at most `max_concurrent` of them; beyond that the socket
  is not read (back-pressure).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, cast

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from async_rl.core import errors
from async_rl.core.codec import decode, encode
from async_rl.core.errors import AsyncRLError, DeadlineExceeded, InfrastructureError, Unavailable
from async_rl.protocol.base import Failure, Message
from async_rl.wire.keys import Keys

Handler = Callable[[Any], Awaitable[Message]]

_LINGER_MS = 1000  # what is queued at close may still leave, e.g. the last report of a process
_HANDSHAKE_MS = 10_000
_ZMTP_HEARTBEAT_MS = 5_000  # finds peers whose machine is gone; ordinary deadlines find the rest


class _OnlyClient:
    """Accepts exactly one public key."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question: may this key connect?"""
        return key == self._public


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMTP_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6 * _ZMTP_HEARTBEAT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, 2**31)


class RpcServer:
    """Answers the messages of `handlers`. Use as a context manager around `serve()`, which runs
    until cancelled.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Keys,
        handlers: Mapping[type[Message], Handler],
        *,
        max_concurrent: int = 4096,
    ) -> None:
        self._handlers = dict(handlers)
        self._expected = _union(self._handlers)
        self._slots = asyncio.Semaphore(max_concurrent)
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OnlyClient(keys.client_public)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.server_public.encode()
        self._socket.curve_secretkey = keys.server_secret.encode()
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(
                f"cannot bind tcp://{host}:{port}: {error.strerror}; choose another port or 0 for a"
                " free one"
            ) from error
        self.address = (
            cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        )

    async def serve(self) -> None:
        """Reads requests and runs their handlers until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                frames = await self._socket.recv_multipart()
                task = group.create_task(self._answer(frames), name="rpc handler")
                task.add_done_callback(lambda _: self._slots.release())

    async def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        peer, request_id, payload = frames
        try:
            request = decode(payload, self._expected)
            reply = await self._handlers[type(request)](request)
        except AsyncRLError as error:
            reply = Failure(error=type(error).__name__, message=str(error))
        await self._socket.send_multipart([peer, request_id, encode(reply)])

    def close(self) -> None:
        """Closes the socket; queued replies may leave for one more second."""
        self._authenticator.stop()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _union(handlers: Mapping[type[Message], Handler]) -> Any:
    expected: Any = None
    for message in handlers:
        expected = message if expected is None else expected | message
    return expected


def _raise(failure: Failure, address: str) -> None:
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        raise kind(failure.message)
    raise InfrastructureError(f"{address} answered {failure.error}: {failure.message}")


class RpcClient:
    """Calls one server. Use as an async context manager; calls may overlap."""

    def __init__(
        self, address: str, keys: Keys, *, context: zmq.asyncio.Context | None = None
    ) -> None:
        """context: one that many clients of a process share and that outlives them; None = one of
        its own.
        """
        self.address = address
        self._is_own = context is None
        self._context = context or zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.curve_serverkey = keys.server_public.encode()
        self._socket.curve_publickey = keys.client_public.encode()
        self._socket.curve_secretkey = keys.client_secret.encode()
        self._socket.connect(address)
        self._ids = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._receiver: asyncio.Task[None] | None = None

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """Sends the request and returns its reply. Raises DeadlineExceeded after timeout_s, or what
        the handler raised.
        """
        request_id = next(self._ids).to_bytes(8, "big")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart([request_id, encode(request)])
                payload = await future
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.address} did not answer {type(request).__name__} within {timeout_s:g} s"
            ) from error
        finally:
            del self._pending[request_id]
        expected: Any = request.Reply  # type: ignore[attr-defined]
        reply: Any = decode(payload, expected | Failure)
        if isinstance(reply, Failure):
            _raise(reply, self.address)
        return reply

    @property
    def is_busy(self) -> bool:
        """Whether a call waits for its reply."""
        return bool(self._pending)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            future = self._pending.get(frames[0]) if len(frames) == 2 else None
            if future is not None and not future.done():
                future.set_result(frames[1])

    def start(self) -> None:
        """Begins to read replies, in a task that `close` ends."""
        self._receiver = asyncio.create_task(self._receive(), name=f"replies of {self.address}")

    async def close(self, *, linger_ms: int = _LINGER_MS) -> None:
        """Ends the reader and fails the calls that still wait. linger_ms: how long requests that
        are not sent yet may still leave.
        """
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait([self._receiver])
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unavailable(f"the connection to {self.address} was closed"))
        self._socket.close(linger=linger_ms)
        if self._is_own:
            self._context.term()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
