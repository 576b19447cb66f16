"""The verifier's HTTP face: Starlette routes around a `Judge`, with a bounded queue, a bearer token and a drain.

POST /verify, POST /verify_batch (results stream as they finish), GET /health.  Bodies are JSON, or MessagePack when the content type says
so; a batch is answered by lines of JSON, or by MessagePack values, each after its length as uint32.
Invariants: at most `queue_size` programs wait, then 429 with Retry-After; a client that leaves takes its programs with it; after `drain`
new work is refused with 503 while what was admitted is finished.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from async_rl.errors import InfrastructureError
from async_rl.observability.activity import Activity
from async_rl.rewards.judging import Judge
from async_rl.rewards.protocol import BatchLine, BatchRequest, ErrorReply, Health, VerifyRequest, VerifyResponse, infrastructure_response
from async_rl.sandbox.pool import Pool

T = TypeVar("T")
MSGPACK = "application/msgpack"
_JSON = "application/json"
_NDJSON = "application/x-ndjson"
_MAX_BODY_BYTES = 64 << 20
_RETRY_AFTER_S = "1"


class Refused(Exception):
    """A request that gets an error reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class VerifierService:
    """The work of one verifier process: admission, running, counting."""

    pool: Pool
    judge: Judge
    queue_size: int
    num_cells: int
    activity: Activity = field(default_factory=Activity)
    num_done: int = 0
    num_infrastructure_errors: int = 0
    is_draining: bool = False
    _num_admitted: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def admit(self, count: int) -> None:
        """Take `count` programs on, or raise Refused."""
        if self.is_draining:
            raise Refused(503, "this verifier is shutting down; ask another one")
        if self._num_admitted and self._num_admitted + count > self.queue_size + self.num_cells:
            raise Refused(429, f"{self._num_admitted} programs are here and {self.queue_size} may wait; come back later")
        self._num_admitted += count
        self._idle.clear()

    def release(self, count: int) -> None:
        """Programs that were admitted are done, or given up."""
        self._num_admitted -= count
        if not self._num_admitted:
            self._idle.set()

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """One admitted program. An infrastructure failure is a response of its own."""
        try:
            with self.activity("judging"):
                response = await self.judge.verify(request)
        except InfrastructureError as error:
            self.num_infrastructure_errors += 1
            response = infrastructure_response(str(error), self.pool.level)
        self.num_done += 1
        return response

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what was admitted; False if some was left after `timeout_s`."""
        self.is_draining = True
        if not self._num_admitted:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def health(self) -> Health:
        """The state of this process."""
        hello = self.pool.hello
        running = max(0, self.num_cells - self.pool.num_free)
        return Health(
            status="draining" if self.is_draining else "ok",
            level=self.pool.level,
            landlock_abi=hello.landlock_abi if hello else 0,
            has_seccomp=bool(hello and hello.has_seccomp),
            cells=self.num_cells,
            queued=max(0, self._num_admitted - running),
            running=running,
            done=self.num_done,
            infrastructure_errors=self.num_infrastructure_errors,
            cells_replaced=self.pool.num_replaced,
            reasons=list(self.pool.reasons),
        )


def build_app(service: VerifierService, token: str) -> Starlette:
    """The ASGI application of one verifier."""
    expected = f"Bearer {token}".encode()

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").encode()
                if not hmac.compare_digest(given, expected):
                    raise Refused(401, "the bearer token is missing or wrong")
                return await handler(request)
            except Refused as refused:
                return _error(refused)
            except ClientDisconnect:
                return Response(status_code=499)

        return handle

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
        encode, media_type = (_packed_line, MSGPACK) if _is_packed(request) else (_json_line, _NDJSON)
        return StreamingResponse(_results(service, asked.requests, encode), media_type=media_type)

    async def health(request: Request) -> Response:
        return _reply(request, service.health())

    return Starlette(
        routes=[
            Route("/verify", guarded(verify), methods=["POST"]),
            Route("/verify_batch", guarded(verify_batch), methods=["POST"]),
            Route("/health", guarded(health), methods=["GET"]),
        ]
    )


async def _results(
    service: VerifierService, requests: Sequence[VerifyRequest], encode: Callable[[BatchLine], bytes]
) -> AsyncIterator[bytes]:
    """Lines in the order in which programs finish, those that finish together in one piece."""
    finished: asyncio.Queue[bytes] = asyncio.Queue()

    async def one(index: int, request: VerifyRequest) -> None:
        try:
            finished.put_nowait(encode(BatchLine(index=index, response=await service.verify(request))))
        finally:
            service.release(1)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, request), name=f"verify-{i}") for i, request in enumerate(requests)]
        try:
            left = len(requests)
            while left:
                lines = [await finished.get()]
                while not finished.empty():
                    lines.append(finished.get_nowait())
                left -= len(lines)
                yield b"".join(lines)
        finally:
            for task in tasks:
                task.cancel()


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
            raise Refused(413, f"the body is larger than {_MAX_BODY_BYTES >> 20} MB; send fewer programs at a time")
    try:
        return msgspec.msgpack.decode(body, type=expected) if _is_packed(request) else msgspec.json.decode(body, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"bad request: {error}") from error


def _is_packed(request: Request) -> bool:
    return request.headers.get("content-type") == MSGPACK


def _reply(request: Request, value: msgspec.Struct) -> Response:
    if _is_packed(request):
        return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)
    return Response(msgspec.json.encode(value), media_type=_JSON)


def _packed_line(line: BatchLine) -> bytes:
    data = msgspec.msgpack.encode(line)
    return struct.pack("<I", len(data)) + data


def _json_line(line: BatchLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _error(refused: Refused) -> Response:
    headers = {"Retry-After": _RETRY_AFTER_S} if refused.status in (429, 503) else {}
    return Response(msgspec.json.encode(ErrorReply(error=str(refused))), refused.status, headers, _JSON)
