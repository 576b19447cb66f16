"""One verifier from its first cell to its last answer: opens the jail, serves HTTP on a socket,
drains and exits.

Takes settings and a bound socket, waits for requests, and sends answers. Woken by: a request;
`stopping`, after which new work is refused, admitted work is finished, and the server exits.

A connection is unknown until a request on it has shown the token. Invariants: descriptors are left
for cells, however many clients connect; a connection beyond the limit replaces the oldest unknown
connection, so clients that send nothing do not block other clients; an unknown connection is closed
after `_UNKNOWN_S` or `_UNKNOWN_BYTES`; a client that repeats an error cannot fill the log.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, Unavailable
from async_rl.observability.activity import Activity
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.reward_process import RewardProcess
from async_rl.rewards.verifier.server import build_app
from async_rl.rewards.verifier.service import VerifierService
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.wire.http import Connection, serving, url_of

QUEUE_SIZE = 4096
"""Programs that wait at most; the next is refused with 429. Eight generators with 64 groups of 8
can have this number in flight; more than usual, because some trainers count a refusal as a wrong
answer.
"""
# Long enough for the first headers over a slow network; docs/verifier.md promises it.
_UNKNOWN_S = 10.0
_UNKNOWN_BYTES = 1 << 20
"""Room for headers, and for the part of the body that a client sends before its token is read."""
# A generator opens 4 for its programs and up to reward.concurrency for its calls.
_MOST_CONNECTIONS = 4096
# Standard streams, the log, the event loop, the listening socket, the pipes of children.
_OWN_DESCRIPTORS = 48
_CELL_DESCRIPTORS = 140
"""A job of 64 streams has a file for each input and each output."""
_ACCEPTED_AT_ONCE = 16
"""asyncio accepts this many connections before it runs anything else, whatever the limit is."""


@contextlib.asynccontextmanager
async def open_service(
    config: RunConfig, activity: Activity | None = None, *, has_functions: bool = False
) -> AsyncIterator[VerifierService]:
    """A service with warm cells. has_functions: load the functions of the configuration.

    Raises ConfigError if no jail works here, with the reason of each level, or if a function cannot
    be loaded.
    """
    # The jobs of eight cells need more descriptors than the usual limit of a shell.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # As many again for slow programs, which would otherwise hold up the quick ones.
    num_cells = 2 * config.verifiers.cells
    async with contextlib.AsyncExitStack() as stack:
        try:
            cells = await Cells.start(num_cells, allow_unsafe=config.sandbox.allow_unsafe)
        except Unsafe as error:
            raise ConfigError(str(error)) from error
        await stack.enter_async_context(cells)
        judge = Judge(
            cells, config.sandbox, num_others=num_cells, num_containers=config.verifiers.cells
        )
        stack.push_async_callback(judge.close)
        functions = RewardProcess(config.reward, timeouts=config.timeouts)
        stack.push_async_callback(functions.close)
        if has_functions:
            await functions.start()
        yield VerifierService(
            functions=functions,
            cells=cells,
            judge=judge,
            queue_size=QUEUE_SIZE,
            num_cells=config.verifiers.cells,
            num_spare=config.verifiers.cells,
            queue_timeout_s=config.timeouts.score_s,
            activity=activity,
        )


async def serve(
    service: VerifierService,
    listener: socket.socket,
    *,
    token: str,
    ready: Callable[[str], Awaitable[None]],
    stopping: asyncio.Event,
    log: logging.Logger,
) -> None:
    """Serve until `stopping`, then finish admitted programs.

    ready: called with the URL once requests are accepted.
    """
    unknown: dict[Any, _Connection] = {}
    url = url_of(listener)
    http = serving(
        build_app(service, token, lambda client: unknown.pop(client, None)),
        listener,
        accepted_at_once=_ACCEPTED_AT_ONCE,
        protocol=partial(_Connection, _most_connections(2 * service.num_cells), unknown),
    )
    # Its warnings are about requests that are not HTTP: a client could fill the log with them.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    async with http as server:
        await ready(url)
        stopped = asyncio.create_task(stopping.wait(), name="stopping")
        await asyncio.wait((server, stopped), return_when=asyncio.FIRST_COMPLETED)
        # The server may have exited before `stopping`; then this task would outlive the block.
        stopped.cancel()
        if server.done():
            raise Unavailable(f"the HTTP server on {url} ended unexpectedly")
        if not await service.drain():
            log.warning("left with programs unfinished after %g s", service.queue_timeout_s)


def _most_connections(num_cells: int) -> int:
    """The connections of one server for which descriptors are left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = hard - _OWN_DESCRIPTORS - _CELL_DESCRIPTORS * num_cells - _ACCEPTED_AT_ONCE
    # A negative hard limit means no limit. asyncio accepts some connections whatever the limit is,
    # so a smaller limit has no effect.
    most = _MOST_CONNECTIONS if hard < 0 else min(_MOST_CONNECTIONS, left)
    return max(most, _ACCEPTED_AT_ONCE)


class _Connection(Connection):
    """A connection with the limits of an unknown one. Its headers have the token.

    most: connections at a time; unknown: those that have not shown the token, oldest first, by
    their address, which is all that the application knows about the connection of a request.
    """

    headers_s = _UNKNOWN_S

    def __init__(self, most: int, unknown: dict[Any, Any], **options: Any) -> None:
        super().__init__(**options)
        self._most = most
        self._unknown = unknown
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the limits; end the oldest unknown connection if there are too many."""
        super().connection_made(transport)
        self._unknown[self.client] = self
        # uvicorn counts the connections of the server, aborted ones too until they are lost.
        if len(self.connections) > self._most:
            # Removed now: its end is reported later, and it must not be aborted twice.
            self._unknown.pop(next(iter(self._unknown))).transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self._unknown.pop(self.client, None)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Read, up to the limit of an unknown connection."""
        self._num_bytes += len(data)
        # server.py limits the size and the time of the body of a connection that has shown the
        # token.
        if self._num_bytes > _UNKNOWN_BYTES and self.client in self._unknown:
            self.transport.abort()
        # An aborted connection can still deliver data; parsing it would start a request without a
        # client.
        if not self.transport.is_closing():
            super().data_received(data)
