"""Serving of the web view until it is interrupted."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from async_rl.core.errors import ConfigError
from async_rl.runs.view.library import Library
from async_rl.runs.view.server import build_app


def serve(
    directory: Path, *, host: str, port: int, token: str, ready: Callable[[int], None]
) -> None:
    """Serve the runs of a directory until Ctrl-C or SIGTERM. ready: called with the bound port.

    Raises ConfigError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be bound: {error.strerror}; choose another port,"
            " or 0 for a free one"
        ) from error
    app = build_app(Library(directory), token=token)
    config = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="off",
        # A live page asks every few seconds, and the printed link is in its first line.
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    # uvicorn raises the signal again after its orderly end, which Ctrl-C is here.
    with listener, contextlib.suppress(KeyboardInterrupt):
        ready(listener.getsockname()[1])
        uvicorn.Server(config).run(sockets=[listener])
