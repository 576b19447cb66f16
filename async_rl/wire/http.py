"""What the HTTP servers of processes share: uvicorn that leaves signals to its process, and
requests that end with their clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request

BACKLOG = 2048
"""Connections that wait to be accepted."""
T = TypeVar("T")


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the process has handlers already."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and let as many connections wait as before: uvicorn sets that number too."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
