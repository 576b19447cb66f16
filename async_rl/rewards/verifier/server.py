"""The HTTP server of one verifier: serves a `VerifierService` on a socket until it is stopped.

POST /verify, POST /verify_batch (results stream as they finish), GET /health; the forms of other
systems are in `wire.py`. A body is JSON, or MessagePack if its content type says so, which keeps
values that JSON has not; answers are JSON, and the answer to a batch is lines of JSON. Woken by: a
request; `stopping`, after which new work is refused, admitted work is finished, and the server
exits.

Invariants: every request needs the token, as `Authorization: Bearer T` or in a path that starts
with /token/T; a bad request is a 4xx that names the path of its field; a full queue is 429 with
Retry-After; the programs of a client that disconnects end with it. A connection is unknown until a
request on it has shown the token: beyond the limit of connections the oldest unknown one is
replaced, so that clients that send nothing do not block others and descriptors are left for cells;
it is closed after `_UNKNOWN_S` or `_UNKNOWN_BYTES`; a client that repeats an error cannot fill the
log.
"""

import asyncio
import contextlib
import hmac
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from async_rl.core.errors import DataError, Unavailable
from async_rl.rewards.verifier.protocol import BatchLine, BatchRequest, ErrorReply, VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.rewards.verifier.wire import FORMS, Form
from async_rl.wire.http import Connection, body_of, json_response, serving, url_of, while_connected

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
T = TypeVar("T")
MSGPACK = "application/msgpack"
# 2 MB for each program of a client's batch; a body is in memory before it is read.
_MAX_BODY_BYTES = 64 << 20
_RETRY_AFTER_S = "1"
_LINGER_S = 0.003
"""A finished result waits this long for others of its batch: sending and receiving single results
costs both sides as much as judging the programs.
"""
_TOKEN_PATH = "/token/"


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


def build_app(
    service: VerifierService, token: str, known: Callable[[Any], object] = lambda client: None
) -> ASGIApp:
    """The ASGI application of one verifier.

    known: called with the address of each client that has the token.
    """

    async def answered(
        request: Request, program: VerifyRequest, work: Callable[[VerifyRequest], Awaitable[Any]]
    ) -> Response:
        # Before the admission, which a program that cannot be judged must not take.
        await service.require(program)
        service.admit(1)
        try:
            return json_response(await while_connected(request, work(program)))
        finally:
            service.release()

    async def verify(request: Request) -> Response:
        return await answered(request, await _read(request, VerifyRequest), service.verify)

    async def verify_batch(request: Request) -> ASGIApp:
        batch = await _read(request, BatchRequest)
        # A batch is admitted whole or not at all: a client can repeat a refused batch, but not a
        # part of it.
        service.admit(len(batch.requests))
        return partial(_send_batch, service, batch.requests, request)

    async def foreign(form: type[Form], request: Request) -> Response:
        body = await _read(request, form)
        try:
            program = body.program()
        except (DataError, ValueError) as error:
            raise HTTPException(400, f"bad request: {error}") from error
        try:
            return await answered(request, program, partial(body.answer, service))
        except HTTPException as refused:
            # SandboxFusion's clients retry after a 504 only, AReaL's after any status but 200.
            status = 504 if refused.status_code in (429, 503) else refused.status_code
            raise HTTPException(status, refused.detail) from refused

    async def health(_: Request) -> Response:
        return json_response(service.health())

    async def disconnected(_: Request, __: Exception) -> Response:
        # No client is left to read it; without a response Starlette would log an error.
        return Response(status_code=499)

    app = Starlette(
        routes=[
            Route("/verify", verify, methods=["POST"]),
            Route("/verify_batch", verify_batch, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            *(
                Route(path, partial(foreign, form), methods=["POST"])
                for path, form in FORMS.items()
            ),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: disconnected},
    )
    return _guarded(app, token, known)


def _guarded(app: ASGIApp, token: str, known: Callable[[Any], object]) -> ASGIApp:
    """Let a request pass if it has the token, which is removed from its path; else end its
    connection.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("authorization", "").partition("Bearer ")[2]
            if scope["path"].startswith(_TOKEN_PATH):
                given, _, rest = scope["path"].removeprefix(_TOKEN_PATH).partition("/")
                scope = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
            # In constant time, because a comparison that stops early shows how much of the token is
            # right.
            if not hmac.compare_digest(given.encode(), token.encode()):
                # Before the body is read: only a client with the token may fill the memory.
                reason = "the token is missing or wrong: send Authorization: Bearer <token>"
                response = await _refuse(None, HTTPException(401, reason))
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
            # From here on the connection is exempt from the limits of unknown connections.
            known(scope["client"])
        await app(scope, receive, send)

    return guarded


async def _send_batch(
    service: VerifierService,
    requests: Sequence[VerifyRequest],
    request: Request,
    _scope: Scope,
    _receive: Receive,
    send: Send,
) -> None:
    """Send results in the order of completion; results that finish together share a piece."""

    finished: asyncio.Queue[bytes] = asyncio.Queue()

    async def verify(index: int, program: VerifyRequest) -> None:
        line = BatchLine(index=index, response=await service.verify(program))
        finished.put_nowait(msgspec.json.encode(line) + b"\n")

    async def verify_all() -> None:
        # A fault of ours breaks the answer off, so that the client tries another verifier.
        async with asyncio.TaskGroup() as group:
            for index, program in enumerate(requests):
                task = group.create_task(verify(index, program), name=f"verify-{index}")
                # Not in the task itself: a task that is cancelled before it starts runs no code.
                task.add_done_callback(lambda _: service.release())
            headers = [(b"content-type", b"application/x-ndjson")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            num_left = len(requests)
            while num_left:
                lines = [await finished.get()]
                # After the last result no other can share the piece, so waiting would only delay
                # the answer.
                if num_left > 1:
                    await asyncio.sleep(_LINGER_S)
                while not finished.empty():
                    lines.append(finished.get_nowait())
                num_left -= len(lines)
                body = b"".join(lines)
                await send({"type": "http.response.body", "body": body, "more_body": num_left > 0})

    with contextlib.suppress(ClientDisconnect):
        await while_connected(request, verify_all())


async def _read(request: Request, expected: type[T]) -> T:
    body = await body_of(request, most_bytes=_MAX_BODY_BYTES)
    try:
        if request.headers.get("content-type") == MSGPACK:
            return msgspec.msgpack.decode(body, type=expected)
        return msgspec.json.decode(body, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the path of a wrong field; a text that is not JSON has none.
        where = "" if "`$" in str(error) else " - at `$`"
        raise HTTPException(400, f"bad request: {error}{where}") from error


async def _refuse(_: Any, refused: Any) -> Response:
    response = json_response(ErrorReply(error=refused.detail), refused.status_code)
    if refused.status_code in (429, 503, 504):
        response.headers["Retry-After"] = _RETRY_AFTER_S
    return response


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
        # The size and the time of a body are limited once the connection has shown the token.
        if self._num_bytes > _UNKNOWN_BYTES and self.client in self._unknown:
            self.transport.abort()
        # An aborted connection can still deliver data; parsing it would start a request without a
        # client.
        if not self.transport.is_closing():
            super().data_received(data)


def _most_connections(num_cells: int) -> int:
    """The connections of one server for which descriptors are left."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = hard - _OWN_DESCRIPTORS - _CELL_DESCRIPTORS * num_cells - _ACCEPTED_AT_ONCE
    # A negative hard limit means no limit. asyncio accepts some connections whatever the limit is,
    # so a smaller limit has no effect.
    most = _MOST_CONNECTIONS if hard < 0 else min(_MOST_CONNECTIONS, left)
    return max(most, _ACCEPTED_AT_ONCE)
