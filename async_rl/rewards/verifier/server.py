"""The verifier's HTTP face: Starlette routes around a `VerifierService`.

POST /verify, POST /verify_batch (results stream as they finish), GET /health, GET /metrics
(Prometheus); the forms of other systems are in `wire_forms.py`.  Bodies are JSON, or MessagePack
when the content type says so; a batch is answered by lines of JSON, or by MessagePack values, each
after its length as uint32. Invariants: nothing is answered without the token, as `Authorization:
Bearer T` or as a path that begins with /token/T; a bad request is a 4xx that names the path of its
field; a full queue is 429 with Retry-After; a client that leaves takes its programs with it.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.rewards.verifier.protocol import BatchLine, BatchRequest, ErrorReply, VerifyRequest
from async_rl.rewards.verifier.service import Refused, VerifierService
from async_rl.rewards.verifier.wire_forms import FORMS, Form

T = TypeVar("T")
MSGPACK = "application/msgpack"
_JSON = "application/json"
_NDJSON = "application/x-ndjson"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_MAX_BODY_BYTES = 64 << 20
_RETRY_AFTER_S = "1"
_LINGER_S = 0.003
"""A finished result waits so long for others of its batch: writing and reading each by itself costs
both sides as much as judging it.
"""
_TOKEN_PATH = "/token/"


def build_app(service: VerifierService, token: str) -> ASGIApp:
    """The ASGI application of one verifier."""

    async def verify(request: Request) -> Response:
        asked = await _read(request, VerifyRequest)
        service.admit(1)
        try:
            response = await _while_connected(request, service.verify(asked))
        finally:
            service.release(1)
        return _reply(request, response)

    async def verify_batch(request: Request) -> Response:
        asked = await _read(request, BatchRequest)
        service.admit(len(asked.requests))
        return _Batch(service, asked.requests, is_packed=_is_packed(request))

    async def foreign(form: Form[msgspec.Struct], request: Request) -> Response:
        asked = await _read(request, form.request)
        try:
            work = form.answer(service, asked)
            service.admit(1)
        except Refused as refused:
            raise Refused(form.status(refused.status), str(refused)) from refused
        try:
            reply = await _while_connected(request, work())
        finally:
            service.release(1)
        return _json_response(reply)

    async def health(request: Request) -> Response:
        return _reply(request, service.health())

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), media_type=_PROMETHEUS)

    routes = [
        Route("/verify", verify, methods=["POST"]),
        Route("/verify_batch", verify_batch, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *(Route(form.path, partial(foreign, form), methods=["POST"]) for form in FORMS),
    ]
    return _Guard(
        Starlette(
            routes=routes, exception_handlers={Refused: _refuse, ClientDisconnect: _nobody_listens}
        ),
        token,
    )


class _Guard:
    """Lets a request pass if it has the token, in its header or at the beginning of its path, which
    is taken off.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            header = next(
                (value for name, value in scope["headers"] if name == b"authorization"), b""
            )
            given = header.removeprefix(b"Bearer ") if header.startswith(b"Bearer ") else b""
            if scope["path"].startswith(_TOKEN_PATH):
                named, _, rest = scope["path"].removeprefix(_TOKEN_PATH).partition("/")
                given, scope = (
                    named.encode(),
                    {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()},
                )
            if not hmac.compare_digest(given, self._token):
                await _error(
                    Refused(
                        401, "the token is missing or wrong: send Authorization: Bearer <token>"
                    )
                )(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Batch(Response):
    """Lines in the order in which programs finish, those that finish nearly together in one piece.
    Owns the programs' admission.
    """

    def __init__(
        self, service: VerifierService, requests: Sequence[VerifyRequest], *, is_packed: bool
    ) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._service, self._requests = service, requests
        self._encode = _packed_line if is_packed else _json_line
        self.media_type = MSGPACK if is_packed else _NDJSON
        self.raw_headers = [(b"content-type", self.media_type.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        finished: asyncio.Queue[bytes | BaseException] = asyncio.Queue()

        def ended(task: asyncio.Task[None]) -> None:
            self._service.release(1)
            if not task.cancelled() and (fault := task.exception()) is not None:
                finished.put_nowait(
                    fault
                )  # a fault of ours breaks the answer off, so that the client asks somebody else

        tasks = [
            asyncio.create_task(self._one(i, r, finished), name=f"verify-{i}")
            for i, r in enumerate(self._requests)
        ]
        for task in tasks:
            task.add_done_callback(ended)
        leaving = asyncio.create_task(_left(receive, finished), name="client leaves")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = len(tasks)
            while left:
                lines = [await finished.get()]
                if left > 1:
                    await asyncio.sleep(_LINGER_S)
                while not finished.empty():
                    lines.append(finished.get_nowait())
                texts = [line for line in lines if isinstance(line, bytes)]
                for fault in (line for line in lines if isinstance(line, BaseException)):
                    raise fault
                left -= len(texts)
                await send(
                    {"type": "http.response.body", "body": b"".join(texts), "more_body": left > 0}
                )
        except ClientDisconnect:
            return
        finally:
            for task in (leaving, *tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self, index: int, request: VerifyRequest, finished: asyncio.Queue[bytes | BaseException]
    ) -> None:
        finished.put_nowait(
            self._encode(BatchLine(index=index, response=await self._service.verify(request)))
        )


async def _left(receive: Receive, finished: asyncio.Queue[bytes | BaseException]) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
    finished.put_nowait(ClientDisconnect())


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
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


async def _read(request: Request, expected: type[T]) -> T:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(
                413,
                f"the body is larger than {_MAX_BODY_BYTES >> 20} MB; send fewer programs at a"
                " time",
            )
    try:
        return (
            msgspec.msgpack.decode(body, type=expected)
            if _is_packed(request)
            else msgspec.json.decode(body, type=expected)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        where = "" if "`$" in str(error) else " - at `$`"
        raise Refused(400, f"bad request: {error}{where}") from error


def _is_packed(request: Request) -> bool:
    return request.headers.get("content-type") == MSGPACK


def _reply(request: Request, value: msgspec.Struct) -> Response:
    if _is_packed(request):
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)
    return _json_response(value)


def _json_response(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)


def _packed_line(line: BatchLine) -> bytes:
    data = msgspec.msgpack.encode(line)
    return struct.pack("<I", len(data)) + data


def _json_line(line: BatchLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _error(refused: Refused) -> Response:
    headers = {"Retry-After": _RETRY_AFTER_S} if refused.status in (429, 503, 504) else {}
    return Response(
        msgspec.json.encode(ErrorReply(error=str(refused))), refused.status, headers, _JSON
    )


async def _refuse(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    return _error(refused)


async def _nobody_listens(_: Request, __: Exception) -> Response:
    return Response(status_code=499)
