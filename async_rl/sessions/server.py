"""The HTTP endpoint of a gateway: Starlette routes around the open sessions.

POST to the paths of FORMS, /v1/session/run and /v1/session/reward; GET /v1/models and
/v1/session/task. Invariants: every request needs the token of an open session, as
`Authorization: Bearer T` or `x-api-key: T`; a bad request is answered in the form of its API; the
calls of a client that disconnects end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from async_rl.core.errors import AsyncRLError
from async_rl.sessions.forms.anthropic_messages import messages
from async_rl.sessions.forms.form import MODEL, Event, Exchange, Form
from async_rl.sessions.forms.openai_chat import chat_completions
from async_rl.sessions.forms.openai_responses import responses
from async_rl.sessions.forms.openai_text import completions
from async_rl.sessions.refusals import Refused
from async_rl.sessions.session import Answer, Session
from async_rl.wire.http import while_connected

_MAX_BODY_BYTES = 16 << 20
_BODY_S = 60.0
_JSON = "application/json"
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "async_rl"}
FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/messages": messages,
    "/v1/responses": responses,
}


class Sessions:
    """The open sessions by their tokens."""

    def __init__(self) -> None:
        self._by_token: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    @property
    def num_calling(self) -> int:
        """Sessions that wait for the engine; the others wait for their agents."""
        return sum(session.num_open > 0 for session in self._by_token.values())

    @contextlib.contextmanager
    def open(self, session: Session) -> Any:
        """Serve the session until the block ends."""
        self._by_token[session.token] = session
        try:
            yield session
        finally:
            del self._by_token[session.token]
            session.close("its sample is complete or was given up")

    def of(self, request: Request) -> Session:
        """Return the session of a request. Raises Refused."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer":
            token = request.headers.get("x-api-key", "")
        session = self._by_token.get(token)
        if session is None:
            raise Refused(
                401,
                "the token is missing, or its session is unknown or has ended; send the"
                " OPENAI_API_KEY that the agent was given",
                code="invalid_api_key",
            )
        return session


class _Endpoint:
    """The handlers of the routes."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def models(self, request: Request) -> Response:
        self._sessions.of(request)
        return _json({"object": "list", "data": [_MODEL]})

    async def model(self, request: Request) -> Response:
        self._sessions.of(request)
        if request.path_params["name"] != MODEL:
            raise Refused(404, f"only {MODEL!r} is served here", code="model_not_found")
        return _json(_MODEL)

    async def task(self, request: Request) -> Response:
        return _json(self._sessions.of(request).task)

    async def run(self, request: Request) -> Response:
        session = self._sessions.of(request)
        session.require_open()
        return _json(await session.run(await _body(request)))

    async def reward(self, request: Request) -> Response:
        session = self._sessions.of(request)
        session.require_open()
        session.rewards.append(_reward_of(await _body(request)))
        return _json({"object": "reward", "num_rewards": len(session.rewards)})

    async def answer(self, request: Request) -> Response:
        session = self._sessions.of(request)
        session.require_open()
        body = await _body(request)
        exchange = FORMS[request.url.path](body, session)
        if exchange.is_streamed:
            # The first piece decides between an answer and an error in the form of the API.
            events = _stream(exchange, session)
            first = await anext(events)
            return StreamingResponse(_lines(first, events), media_type="text/event-stream")
        known = None
        if len(exchange.calls) == 1 and _is_sent_again(request):
            known = session.repeat(exchange.calls[0])
        if known is not None:
            return _json(exchange.reply([known]))
        work = asyncio.gather(*(session.answer(call) for call in exchange.calls))
        return _json(exchange.reply(await while_connected(request, work)))


def build_app(sessions: Sessions) -> ASGIApp:
    """Return the ASGI application of a gateway."""
    endpoint = _Endpoint(sessions)
    return Starlette(
        routes=[
            Route("/v1/models", endpoint.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoint.model, methods=["GET"]),
            Route("/v1/session/task", endpoint.task, methods=["GET"]),
            Route("/v1/session/run", endpoint.run, methods=["POST"]),
            Route("/v1/session/reward", endpoint.reward, methods=["POST"]),
            *(Route(path, endpoint.answer, methods=["POST"]) for path in FORMS),
        ],
        exception_handlers={
            Refused: _refuse,
            AsyncRLError: _unavailable,
            HTTPException: _no_route,
            ClientDisconnect: _disconnected,
        },
    )


def _is_sent_again(request: Request) -> bool:
    """Return whether the client's package says that it got no answer to this request."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _reward_of(body: bytes) -> dict[str, float]:
    try:
        value = msgspec.json.decode(body, type=float | dict[str, float])
    except msgspec.DecodeError as error:
        raise Refused(400, f"a reward is a number or an object of numbers: {error}") from error
    parts = value if isinstance(value, dict) else {"reward": value}
    if not parts or not all(math.isfinite(part) for part in parts.values()):
        raise Refused(400, f"a reward is a finite number or an object of them, not {value}")
    return parts


async def _stream(exchange: Exchange, session: Session) -> AsyncIterator[list[Event]]:
    """The events of a streamed answer, in lists that come together."""
    queue: asyncio.Queue[tuple[int, str | Answer]] = asyncio.Queue()

    async def one(index: int) -> None:
        call = exchange.calls[index]
        answer = await session.answer(call, lambda text: queue.put_nowait((index, text)))
        queue.put_nowait((index, answer))

    answers: dict[int, Answer] = {}
    tasks = [asyncio.create_task(one(index)) for index in range(len(exchange.calls))]
    try:
        is_open = False
        while len(answers) < len(tasks):
            index, news = await _next_of(queue, tasks)
            events = [] if is_open else exchange.opened()
            is_open = True
            if isinstance(news, Answer):
                answers[index] = news
                yield [*events, *exchange.done(index, news)]
            else:
                yield [*events, *exchange.part(index, news)]
        yield exchange.closed([answers[index] for index in sorted(answers)])
    finally:
        # A client that leaves ends its calls; they record what it has read.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next_of(
    queue: asyncio.Queue[tuple[int, str | Answer]], tasks: list[asyncio.Task[None]]
) -> tuple[int, str | Answer]:
    """The next entry of the queue. Raises the exception of a task that failed."""
    getting = asyncio.create_task(queue.get())
    running = {task for task in tasks if not task.done()}
    while not getting.done():
        await asyncio.wait({getting, *running}, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in running if task.done()]:
            running.discard(task)
            if task.exception() is not None:
                getting.cancel()
                task.result()
    return getting.result()


async def _lines(first: list[Event], events: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    yield b"".join(_line(*event) for event in first)
    try:
        async for more in events:
            yield b"".join(_line(*event) for event in more)
    except Refused as refused:
        yield _line("error", _error(refused))
    except AsyncRLError as error:
        yield _line("error", _error(_outage(error)))


def _line(name: str, value: Any) -> bytes:
    data = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise Refused(
                        413, f"the body is larger than {_MAX_BODY_BYTES >> 20} MB; send less text"
                    )
    except TimeoutError as error:
        raise Refused(408, f"the body took longer than {_BODY_S:g} s; send it faster") from error
    return bytes(body)


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _error(refused: Refused) -> dict[str, Any]:
    """The error in the form of both APIs: Anthropic's has `type` beside it, OpenAI's has more in
    it.
    """
    kind = _KINDS.get(refused.status, "invalid_request_error")
    if refused.status >= 500:
        kind = "api_error"
    error = {"message": str(refused), "type": kind, "param": None, "code": refused.code}
    return {"type": "error", "error": error}


def _outage(error: AsyncRLError) -> Refused:
    return Refused(503, f"no engine answers: {error}", code="engine_unavailable")


async def _refuse(_: Request, refused: Exception) -> Response:
    assert isinstance(refused, Refused)
    response = _json(_error(refused), refused.status)
    if refused.status == 503:
        response.headers["Retry-After"] = "1"
    return response


async def _unavailable(request: Request, error: Exception) -> Response:
    assert isinstance(error, AsyncRLError)
    return await _refuse(request, _outage(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(_error(Refused(error.status_code, message)), error.status_code)


async def _disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=499)
