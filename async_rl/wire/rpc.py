"""Requests and replies over ZeroMQ: ROUTER servers and DEALER clients, with CURVE keys and typed
MessagePack.

Frames: [request id (8 bytes), payload]. The payload of a request is one message of the server's
handler table; the payload of a reply is the request's `Reply` or a `Failure`.

Invariants
- Every call has a deadline. A reply that arrives later is dropped.
- A handler that raises an AsyncRLError answers with Failure, and the caller raises the same class.
  Any other exception stops the process.
- A server runs at most `_MOST_HANDLERS` handlers; beyond that it does not read its socket, which
  slows its clients down.
- Keys are created at launch, stored in `<run>/keys/` for the owner only, and never sent. A socket
  accepts only clients with the run's client key, so two runs on one machine cannot talk to each
  other by mistake.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import operator
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from async_rl.core import errors
from async_rl.core.closing import Closing
from async_rl.core.codec import decode, encode
from async_rl.core.errors import AsyncRLError, DeadlineExceeded, InfrastructureError, Unavailable
from async_rl.core.frozen import Value
from async_rl.core.os import write_private
from async_rl.protocol.base import Failure, Message

Handler = Callable[[Any], Awaitable[Message]]

_LINGER_MS = 1000  # messages queued at close may still leave, e.g. the last report of a process
_HANDSHAKE_MS = 10_000
_ZMTP_HEARTBEAT_MS = 5_000  # detects peers whose machine failed; call deadlines cover the rest
_MOST_PEERS = 2**15  # of one process: ZeroMQ's own 1,023 are fewer than a large fleet
MAX_MESSAGE_BYTES = 2**31  # far above any group; a corrupt length must not allocate more
# Bounds the memory of requests while handlers are stuck. Every process of a run has one request for
# the member list pending, so the supervisor can serve nearly as many processes.
_MOST_HANDLERS = 4096
_REFUSED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
_log = logging.getLogger(__name__)
_ERRORS: dict[str, type[AsyncRLError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, AsyncRLError)
}


class Keys(Value):
    """Z85-encoded CURVE keys and the HTTP token of a run."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    token: str


def derived_keys(secret: str) -> Keys:
    """Return the keys of a server whose clients know the same secret and nothing else."""

    def pair(role: str) -> tuple[str, str]:
        private = z85.encode(hashlib.sha256(f"{role} {secret}".encode()).digest())
        return zmq.curve_public(private).decode(), private.decode()

    server_public, server_secret = pair("server")
    client_public, client_secret = pair("client")
    return Keys(
        server_public=server_public,
        server_secret=server_secret,
        client_public=client_public,
        client_secret=client_secret,
        token="",
    )


def create_keys(directory: Path) -> Keys:
    """Create new keys and write them to `directory`/keys.json with mode 600."""
    # One pair for all clients of the run: keys of single processes would have to be distributed
    # while it runs. The token is sent over HTTP, so it shares no secret with the keys.
    keys = msgspec.structs.replace(
        derived_keys(secrets.token_hex()), token=secrets.token_urlsafe(32)
    )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(directory / "keys.json", msgspec.json.encode(keys))
    return keys


def load_keys(directory: Path) -> Keys:
    """Read the keys of `create_keys`. Raises Unavailable if they are missing or not readable."""
    path = directory / "keys.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Keys)
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(f"the run's keys at {path} cannot be read: {error}") from error


def _configure(socket: zmq.asyncio.Socket, public: str, secret: str) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMTP_HEARTBEAT_MS)
    # Six missed heartbeats, so that a short outage of the network breaks no connection.
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6 * _ZMTP_HEARTBEAT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.curve_publickey = public.encode()
    socket.curve_secretkey = secret.encode()


class Handlers:
    """A table of handlers that answers encoded requests."""

    def __init__(self, handlers: Mapping[type[Message], Handler]) -> None:
        self._handlers = dict(handlers)
        # msgspec chooses the class by its tag. A server without handlers decodes nothing.
        self._expected: Any = functools.reduce(operator.or_, handlers) if handlers else None

    async def answer(self, payload: bytes) -> bytes:
        """Return the encoded reply, or the error of the handler as a Failure."""
        try:
            request = decode(payload, self._expected)
            reply = await self._handlers[type(request)](request)
        except AsyncRLError as error:
            reply = Failure(error=type(error).__name__, message=str(error))
        return encode(reply)


def reply_of(request: Message, payload: bytes, address: str) -> Any:
    """Return the reply to a request, or raise the error that the handler at `address` raised."""
    expected: Any = request.Reply  # type: ignore[attr-defined]
    reply: Any = decode(payload, expected | Failure)
    if not isinstance(reply, Failure):
        return reply
    if reply.error in _ERRORS:
        raise _ERRORS[reply.error](reply.message)
    raise InfrastructureError(f"{address} answered {reply.error}: {reply.message}")


class RpcServer(Closing):
    """Answers the messages of `handlers`: a context manager around `serve()`.

    gather_s: pause once no request waits, so that later requests are read together.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: Keys,
        handlers: Mapping[type[Message], Handler],
        *,
        gather_s: float = 0.0,
    ) -> None:
        self._handlers = Handlers(handlers)
        self._gather_s = gather_s
        self._slots = asyncio.Semaphore(_MOST_HANDLERS)
        # One context per server, because an authenticator covers a whole context.
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        # In every domain, the run's key and no other.
        self._authenticator.certs["*"] = {keys.client_public.encode(): True}
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, keys.server_public, keys.server_secret)
        # A client that reconnects takes over its identity; otherwise it would be refused until the
        # old connection times out.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.curve_server = True
        self._monitor = self._socket.get_monitor_socket(_REFUSED)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(
                f"cannot bind tcp://{host}:{port}: {error.strerror}; choose another port or 0 for a"
                " free one"
            ) from error
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT))
        self.address = endpoint.rstrip(b"\0").decode()

    async def serve(self) -> None:
        """Read requests and run their handlers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._name_strangers(), name="strangers")
            while True:
                await self._slots.acquire()
                frames = await self._next()
                task = group.create_task(self._answer(frames), name="rpc handler")
                # Not in `_answer`: a task that is cancelled before it starts runs no code.
                task.add_done_callback(lambda _: self._slots.release())

    async def _name_strangers(self) -> None:
        for number in itertools.count(1):
            await recv_monitor_message(self._monitor)
            # The first, the tenth, the hundredth: a stranger must not fill the log.
            if number == 10 ** (len(str(number)) - 1):
                _log.warning(
                    "a process without the keys of this run has tried to use %s, and was"
                    " refused (%d times by now); other users of this machine or network can do"
                    " that, and read or change nothing",
                    self.address,
                    number,
                )

    async def _next(self) -> list[bytes]:
        """Return the frames of the next request."""
        if self._gather_s > 0:
            # Waking up costs several times as much as one more request.
            with contextlib.suppress(zmq.Again):
                return await self._socket.recv_multipart(zmq.NOBLOCK)
            await asyncio.sleep(self._gather_s)
        return await self._socket.recv_multipart()

    async def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return  # not from an RpcClient
        peer, request_id, payload = frames
        reply = await self._handlers.answer(payload)
        await self._socket.send_multipart([peer, request_id, reply])

    def close(self) -> None:
        """Close the socket; queued replies may leave for one more second."""
        self._authenticator.stop()
        # With every socket of it: one that stays open would hold up the end for ever.
        self._context.destroy()


class RpcClient:
    """Calls one server; calls may overlap. Created inside a running event loop."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.address = address
        # One context for all clients of the process: each context has two threads.
        context = zmq.asyncio.Context.instance()
        context.set(zmq.MAX_SOCKETS, _MOST_PEERS)
        self._socket = context.socket(zmq.DEALER)
        _configure(self._socket, keys.client_public, keys.client_secret)
        self._socket.curve_serverkey = keys.server_public.encode()
        self._socket.connect(address)
        self._ids = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._receiver = asyncio.create_task(self._receive(), name=f"replies of {address}")

    async def call(self, request: Message, *, timeout_s: float) -> Any:
        """Send the request and return its reply.

        Raises DeadlineExceeded after `timeout_s`, or the error that the handler raised.
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
        return reply_of(request, payload, self.address)

    @property
    def is_busy(self) -> bool:
        """True if a call waits for its reply."""
        return bool(self._pending)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            # Not a reply of ours; a client must survive whatever a socket receives.
            if len(frames) != 2:
                continue
            # The call may have passed its deadline.
            future = self._pending.get(frames[0])
            if future is not None and not future.done():
                future.set_result(frames[1])

    async def close(self, *, linger_ms: int = _LINGER_MS) -> None:
        """Stop reading replies and fail the pending calls.

        linger_ms: time for queued requests to leave.
        """
        self._receiver.cancel()
        await asyncio.wait([self._receiver])
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unavailable(f"the connection to {self.address} was closed"))
        self._socket.close(linger=linger_ms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
