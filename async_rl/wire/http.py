"""The HTTP servers of all processes: a bound socket, uvicorn without signal handlers, and requests
that are cancelled when their clients disconnect.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from async_rl.core.errors import ConfigError

BACKLOG = 2048
"""Connections that wait to be accepted."""
# 64 MB in this time need 9 Mbit/s; a slower client would hold the memory of its body for too long.
_BODY_S = 60.0
T = TypeVar("T")


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol with a time limit for the headers of each request."""

    # A client that sends half of its headers would keep its connection for ever.
    headers_s = 60.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the limit: a client may connect and send nothing."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Read; the limit counts while no request is complete up to its body."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._unlimit()
        elif self._deadline is None:
            self._limit()

    def connection_lost(self, error: Exception | None) -> None:
        """End the limit."""
        self._unlimit()
        super().connection_lost(error)

    def _limit(self) -> None:
        self._deadline = self.loop.call_later(self.headers_s, self.transport.abort)

    def _unlimit(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, because the process has handlers already."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and restore the length of the queue of connections, which uvicorn changes."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def listen_again(host: str, file: Path) -> socket.socket:
    """A listener at the port in the file, which an earlier life of the process wrote; at a free
    one, and write it, if there is none or another process has it.
    """
    with contextlib.suppress(OSError, ValueError, ConfigError):
        return listen(host, int(file.read_text()))
    listener = listen(host, 0)
    file.write_text(str(listener.getsockname()[1]))
    return listener


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket. Raises ConfigError if the address is not available."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"{host}:{port} is not an address: the last port is {2**16 - 1}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"{host}:{port} cannot be bound ({reason}); choose another address, or port 0 for a"
            " free one"
        ) from error
    # Accepted connections inherit the option. asyncio sets it only on sockets whose protocol number
    # is set, and accepted sockets have none. Without the option the second part of an answer waits
    # 40 ms for the client's delayed acknowledgement of the first part.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    *,
    close_s: int = 5,
    keep_alive_s: int = 5,
    accepted_at_once: int = BACKLOG,
    protocol: Callable[..., asyncio.Protocol] | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the application until the block exits. Yields the server's task, which finishes earlier
    only if the server fails.

    close_s: time for open requests after the block; keep_alive_s: time for which an idle connection
    stays open; accepted_at_once: connections that asyncio accepts before it runs anything else;
    protocol: makes the protocol of a connection from uvicorn's arguments.
    """
    http: Any = protocol or Connection
    config = uvicorn.Config(
        app,
        http=http,
        backlog=accepted_at_once,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=close_s,
    )
    server = _Server(config)
    # The socket is already listening, so requests that arrive before uvicorn starts wait there.
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield task
    finally:
        server.should_exit = True
        await task


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response with this value as its body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def body_of(request: Request, *, most_bytes: int) -> bytes:
    """The body of a request. Raises HTTPException if it is too large or takes too long."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                # Checked for each chunk, because a chunked body announces no length.
                if len(body) > most_bytes:
                    limit = f"{most_bytes >> 20} MB"
                    raise HTTPException(
                        413, f"the body is larger than {limit}; send less at a time"
                    )
    except TimeoutError as error:
        reason = f"the body took longer than {_BODY_S:g} s; send it faster"
        raise HTTPException(408, reason) from error
    return bytes(body)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
