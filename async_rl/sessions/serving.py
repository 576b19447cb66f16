"""One HTTP server of sessions on a bound socket, until the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

_BACKLOG = 2048
_CLOSE_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, because the process has handlers already."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[str]:
    """Serve the application; yields its URL."""
    config = uvicorn.Config(
        app,
        backlog=_BACKLOG,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    # The socket listens already, so requests that come before uvicorn's start wait there.
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    host, port = listener.getsockname()[:2]
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await task
