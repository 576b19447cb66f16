"""The HTTP endpoint of a gateway: Starlette routes around the open sessions.

POST to the paths of FORMS, /v1/messages/count_tokens, /v1/session/run, /v1/session/reward and
/v1/session/end; GET /v1/models and /v1/responses/ID; POST /sessions, if programs
outside the run are the agents. Invariants: every request needs the token of an open session, as
`Authorization: Bearer T` or `x-api-key: T`, and /sessions the key of the run's sessions; only a
session's second key sets its reward and ends it; a bad request is answered
in the form of its API; the calls of a client that disconnects end with it. A stream has comments
until its answers are complete, then all events; an answer that fails before the first comment is an
error with a status, one that fails later is the last event.
"""

import asyncio
import gc
import hashlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from async_rl.core.errors import AsyncRLError
from async_rl.sessions.calls import Answer, Noted, caller_of
from async_rl.sessions.endpoint import MODEL
from async_rl.sessions.errors import HANDLERS, Refused, error_of, refusal_of
from async_rl.sessions.forms.anthropic_messages import count_tokens
from async_rl.sessions.forms.form import Event, Exchange, read
from async_rl.sessions.forms.openai_responses import known_response
from async_rl.sessions.open_sessions import LONGEST_WAIT_S, Offers, Sessions, token_of
from async_rl.sessions.requests import (
    END,
    FORMS,
    OPEN,
    REWARD,
    Outcome,
    add_reward,
    answered,
    formed,
)
from async_rl.sessions.session import Session
from async_rl.wire.http import body_of, json_response, while_connected

KEEP_ALIVE_S = 600
"""Agents think and run tools between calls. uvicorn's 5 s would close their connections just as
they send the next call, which the client then has to repeat.
"""
QUIET_S = 5.0
"""Seconds between the comments of a stream: clients that wait for 10 s or more stay connected."""
# A full collection visits all that the open sessions hold: 50 to 160 ms of CPU time for 1,000 of
# them, while no call advances, and by Python's default every ten seconds at 80 calls per second.
# It then frees a few hundred objects per call, so it may come twenty times more rarely.
_YOUNG_PER_FULL = 1000
# By Python's default a collection of young objects visits ten times the newest ones: 20 to 74 ms,
# every three seconds, which were the slowest calls. Two times as many take as long in all, in
# shorter pauses.
_NEWEST_PER_YOUNG = 1
_KEY = "idempotency-key"
_STREAM = "text/event-stream"
_MOST_BYTES = 16 << 20
# Bytes of a body per token that a session may have, and besides them. Text has 4 per token; written
# as JSON, and with the long runs of spaces that some vocabularies have, 256 are enough for any.
_TOKEN_BYTES = 256
_OTHER_BYTES = 1 << 20
_body = partial(body_of, most_bytes=_OTHER_BYTES)
_ENDED = {"object": "session.ended"}
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "async_rl"}


class _Wanted(msgspec.Struct):
    """A request for a session. wait_s: seconds to wait for one."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0


class _Endpoint:
    """The handlers of the routes."""

    def __init__(self, sessions: Sessions, offers: Offers | None) -> None:
        self._sessions = sessions
        self._offers = offers

    async def open(self, request: Request) -> Response:
        """Hand out a session, as soon as there is one within the time that the program waits."""
        if self._offers is None:
            raise Refused("this run starts its agents itself; set rollout.fn=external", status=404)
        if not self._offers.accepts(token_of(request)):
            raise Refused(
                "the key is missing or wrong; send api_key of <run>/gateways/<gateway>.json",
                status=401,
                code="invalid_api_key",
            )
        wanted: _Wanted = read(await _body(request) or b"{}", _Wanted)
        await while_connected(request, self._offers.available(wanted.wait_s))
        # No await from here on: a session that is taken reaches the program, or times out.
        offer = self._offers.take(lambda key: self._sessions[key].note(Noted(path=OPEN)))
        if offer is None:
            raise Refused(
                "no session waits for a program; try again", status=503, code="no_session"
            )
        endpoint = msgspec.structs.asdict(offer.endpoint)
        return json_response({"object": "session", "task": offer.task, **endpoint}, 201)

    async def end(self, request: Request) -> Response:
        if self._sessions.has_ended(request):
            # The first answer was lost; the session may be gone since.
            return json_response(_ENDED)
        session = await self._sessions.owned(request)
        body = await _body(request) or b"{}"
        outcome: Outcome = read(body, Outcome)
        if self._offers is None:
            raise Refused(
                "the run closes this session itself when its agent has exited", status=409
            )
        if self._offers.is_taken(session.session_key):
            session.note(Noted(path=END, body=body))
            self._offers.end(session.session_key, outcome)
        session.close("its program has closed it")
        return json_response(_ENDED)

    async def models(self, request: Request) -> Response:
        await self._sessions.of(request)
        return json_response({"object": "list", "data": [_MODEL]})

    async def model(self, request: Request) -> Response:
        await self._sessions.of(request)
        name = request.path_params["name"]
        caller_of(name, {})
        return json_response({**_MODEL, "id": name})

    async def run(self, request: Request) -> Response:
        session = await self._sessions.of(request)
        return json_response(await session.run_tool(await _body(request)))

    async def reward(self, request: Request) -> Response:
        session = await self._sessions.owned(request)
        session.require_open()
        body = await _body(request)
        posted = Noted(path=REWARD, body=body, key=_key_of(request, body))
        if not (posted.key in session.requests and _is_sent_again(request)):
            add_reward(session, posted)
        return json_response({"object": "reward", "num_rewards": len(session.rewards)})

    async def count(self, request: Request) -> Response:
        session = await self._sessions.of(request)
        body = await _call_body(request, session)
        return json_response(await formed(count_tokens, body, session))

    async def response(self, request: Request) -> Response:
        session = await self._sessions.of(request)
        return json_response(known_response(request.path_params["name"], session)[1])

    async def answer(self, request: Request) -> Response:
        session = await self._sessions.of(request)
        try:
            return await self._answer(request, session)
        except AsyncRLError as error:
            # Many agents do not show it.
            session.why_silent = f"its last refused call: {error}"
            raise

    async def _answer(self, request: Request, session: Session) -> Response:
        session.require_open()
        body = await _call_body(request, session)
        path = request.url.path
        exchange = await formed(FORMS[path], body, session)
        noted = Noted(
            path=path,
            body=body,
            key=_key_of(request, body),
            name=exchange.head["id"],
            caller=caller_of(exchange.model, request.headers),
        )
        known: Sequence[Answer] = session.repeated(noted.key) if _is_sent_again(request) else []
        session.names[noted.name] = [answer.number for answer in known]
        if not known:
            answers = answered(session, exchange, noted)
            if exchange.is_streamed:
                # The first lines decide between an answer and an error with a status.
                further = _lines_until(answers, exchange)
                first = await while_connected(request, anext(further))
                return StreamingResponse(_lines_after(first, further), media_type=_STREAM)
            known = await while_connected(request, answers)
        reply = exchange.reply(known)
        if exchange.is_streamed:
            return Response(_lines(exchange.events(reply)), media_type=_STREAM)
        return json_response(reply)


def build_app(sessions: Sessions, offers: Offers | None = None) -> ASGIApp:
    """Return the ASGI application of a gateway. offers: of programs outside the run."""
    endpoint = _Endpoint(sessions, offers)
    return Starlette(
        routes=[
            Route("/v1/models", endpoint.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoint.model, methods=["GET"]),
            Route(OPEN, endpoint.open, methods=["POST"]),
            Route(END, endpoint.end, methods=["POST"]),
            Route("/v1/session/run", endpoint.run, methods=["POST"]),
            Route(REWARD, endpoint.reward, methods=["POST"]),
            Route("/v1/messages/count_tokens", endpoint.count, methods=["POST"]),
            Route("/v1/responses/{name}", endpoint.response, methods=["GET"]),
            *(Route(path, endpoint.answer, methods=["POST"]) for path in FORMS),
        ],
        exception_handlers=HANDLERS,
    )


async def _lines_until(
    answers: Awaitable[Sequence[Answer]], exchange: Exchange
) -> AsyncIterator[bytes]:
    """Yield comments until the answers are complete, then the lines of all events. The answers are
    cancelled with it.
    """
    answering = asyncio.ensure_future(answers)
    try:
        while not (await asyncio.wait([answering], timeout=QUIET_S))[0]:
            yield b": the answer is being written\n\n"
        yield _lines(exchange.events(exchange.reply(await answering)))
    finally:
        answering.cancel()


async def _lines_after(first: bytes, further: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the first lines and all further ones; if the answer fails, the last one is the error,
    because the status has been sent.
    """
    yield first
    try:
        async for more in further:
            yield more
    except AsyncRLError as error:
        yield _lines([("error", error_of(refusal_of(error)))])


def _lines(events: Sequence[Event]) -> bytes:
    """Return the lines of a stream for these events."""
    parts = []
    for name, value in events:
        head = f"event: {name}\n".encode() if name else b""
        parts.append(head + b"data: " + msgspec.json.encode(value) + b"\n\n")
    return b"".join(parts)


async def _call_body(request: Request, session: Session) -> bytes:
    """Return the body of a call. Its size has a limit before anything is read out of it: templates
    and tokenizers take seconds for megabytes.
    """
    most_bytes = min(_MOST_BYTES, _OTHER_BYTES + _TOKEN_BYTES * session.limit)
    return await body_of(request, most_bytes=most_bytes)


def spare_heap() -> None:
    """Exempt the present objects from garbage collections, and search all later ones rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _NEWEST_PER_YOUNG, _YOUNG_PER_FULL)


def _key_of(request: Request, body: bytes) -> bytes:
    """Return what a request has in common with the same request that is sent again."""
    key = request.headers.get(_KEY, "").encode() or body
    return hashlib.sha256(request.url.path.encode() + b"\n" + key).digest()


def _is_sent_again(request: Request) -> bool:
    """Return whether the client says that it may have sent this request before, and got no answer:
    by a count of its package, or by a key that it gives to each request.
    """
    is_counted = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    return is_counted or _KEY in request.headers
