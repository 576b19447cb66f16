"""Serving of the web view until it is interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from async_rl.runs.view.library import Library
from async_rl.runs.view.server import build_app
from async_rl.wire.http import listen, serving


def serve(
    directory: Path, *, host: str, port: int, token: str, ready: Callable[[int], None]
) -> None:
    """Serve the runs of a directory until Ctrl-C or SIGTERM. ready: called with the bound port.

    Raises ConfigError if the address cannot be bound.
    """

    async def until_stopped() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.set)
        with listen(host, port) as listener:
            ready(listener.getsockname()[1])
            app = build_app(Library(directory), token=token)
            async with serving(app, listener, close_s=1):
                await stopping.wait()

    asyncio.run(until_stopped())
