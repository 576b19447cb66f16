"""One HTTP server of sessions on a bound socket, until the block ends, without long pauses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import ASGIApp

from async_rl.wire.http import BACKLOG, HttpServer, url_of

_CLOSE_S = 5
# Agents think and run tools between calls. uvicorn's 5 s would close their connections just as they
# send the next one, which the client then has to repeat.
_KEEP_ALIVE_S = 600
# A full collection visits all that the open sessions hold: 50 to 160 ms of CPU time for 1,000 of
# them, in which no call advances, and by Python's default every ten seconds at 80 calls per second.
# It then frees a few hundred objects per call, so it may come twenty times more rarely.
_YOUNG_PER_FULL = 1000
# By Python's default a collection of young objects visits ten times the newest ones: 20 to 74 ms,
# every three seconds, which were the slowest calls. Two times as many take as long in all, in
# shorter pauses.
_NEWEST_PER_YOUNG = 1


def spare_heap() -> None:
    """Leave what is there out of garbage collections, and search all of the rest rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _NEWEST_PER_YOUNG, _YOUNG_PER_FULL)


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
        timeout_keep_alive=_KEEP_ALIVE_S,
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
