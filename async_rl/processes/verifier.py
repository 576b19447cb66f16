"""A verifier: serves verdicts over HTTP on a free port, from cells that stay warm.

takes: programs with their tests, over HTTP, from generators (and whoever else holds the run's token)
waits for: a free cell
gives: verdicts, per test
woken by: a request; `stopping`, upon which it finishes what it admitted and leaves
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from async_rl.errors import Unavailable
from async_rl.processes.runtime import ProcessContext
from async_rl.rewards.judging import Judge
from async_rl.rewards.server import VerifierService, build_app
from async_rl.sandbox.pool import Pool

_BACKLOG = 2048
_CLOSE_S = 5
"""Seconds for connections to end once all verdicts are out."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has them already."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing is captured."""
        yield


async def run(context: ProcessContext) -> None:
    """Start the cells, serve until told to stop, finish what was admitted."""
    config = context.config
    async with Pool(config.verifiers.cells, allow_unsafe=config.sandbox.allow_unsafe) as pool:
        context.log.info("jail at level %d with %d cells%s", pool.level, config.verifiers.cells, "".join(f"; {r}" for r in pool.reasons))
        service = VerifierService(
            pool=pool, judge=Judge(pool, config.sandbox), queue_size=config.verifiers.queue_size, num_cells=config.verifiers.cells,
            activity=context.activity,
        )  # fmt: skip
        with socket.create_server((config.network.host, 0), backlog=_BACKLOG) as listener:
            host, port = listener.getsockname()[:2]
            server = _Server(
                uvicorn.Config(
                    build_app(service, context.token), lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=_CLOSE_S
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
            try:
                await context.register(f"http://{host}:{port}")
                context.activity.rest("serving")
                stopping = asyncio.create_task(context.stopping.wait(), name="stopping")
                await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if serving.done():
                    raise Unavailable(f"the HTTP server on {host}:{port} ended by itself")
                if not await service.drain(config.verifiers.timeout_s):
                    context.log.warning("left with programs unfinished after %g s", config.verifiers.timeout_s)
            finally:
                server.should_exit = True
                await serving
