"""The HTTP interface of the verifier: Starlette routes around a `VerifierService`.

POST /verify, POST /verify_batch (results stream as they finish), GET /health; the forms of other
systems are in `wire.py`. A body is JSON, or MessagePack if its content type says so, which keeps
values that JSON has not; answers are JSON, and the answer to a batch is lines of JSON. Invariants:
every request needs the token, as `Authorization: Bearer T` or in a path that starts with /token/T;
a bad request is a 4xx that names the path of its field; a full queue is 429 with Retry-After; the
programs of a client that disconnects end with it.
"""

import asyncio
import contextlib
import hmac
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

from async_rl.core.errors import DataError
from async_rl.rewards.verifier.protocol import BatchLine, BatchRequest, ErrorReply, VerifyRequest
from async_rl.rewards.verifier.service import VerifierService
from async_rl.rewards.verifier.wire import FORMS, Form
from async_rl.wire.http import body_of, json_response, while_connected

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
            # From here on the connection is exempt from the limits of unknown connections
            # (serving.py).
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
