"""One HTTP server of sessions on a bound socket, until the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

from async_rl.wire.http import BACKLOG, HttpServer, url_of

_CLOSE_S = 5


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[str]:
    """Serve the application; yields its URL."""
    config = uvicorn.Config(
        app,
        backlog=BACKLOG,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = HttpServer(config)
    # The socket listens already, so requests that come before uvicorn's start wait there.
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task
