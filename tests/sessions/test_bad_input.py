"""Bad input over every API: each has its error in the API's own form, and no session changes. A
large request is refused before it is worked on, and holds up no other one.
"""

import asyncio
import copy
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from clients_support import Clients, user, using
from sessions_support import CHATML, Words, open_session
from tables import table

from async_rl.sessions.forms.parameters import TABLE
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app

USER = user("go")
LONG = "go " * 3000
TALK = {"messages": [{**USER, "content": LONG}]}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}, TALK),
    "responses": ("/v1/responses", {"input": "go"}, {"input": LONG}),
    "completions": ("/v1/completions", {"prompt": "go"}, {"prompt": LONG}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 900}, TALK),
}
"""The path, the fields of a good request and the fields of one that is too long."""


def check(reply: httpx.Response, api: str, status: int, code: str | None = None) -> str:
    """Return the message of an error in the form of the API."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    if api == "messages":
        assert reply.json()["type"] == "error"
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        assert error["type"] == kinds.get(status, "invalid_request_error")
    else:
        assert error.keys() >= {"message", "type", "param", "code"}
        assert error["code"] == code
    assert error["message"]
    return str(error["message"])


@pytest.mark.parametrize("api", FORMS)
async def test_each_bad_request_is_refused_in_the_form_of_its_api(api: str) -> None:
    path, fields, too_long = FORMS[api]
    body = {"model": "policy", **fields}
    async with using(["one"], limit=2000) as (found, session, _):

        async def post(content: Any, key: str = session.token) -> httpx.Response:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            name = "x-api-key" if api == "messages" or not key else "authorization"
            headers = {"authorization": "", name: key if name == "x-api-key" else f"Bearer {key}"}
            return await found.http.post(path, content=data, headers=headers)

        for key in ("", "sk-unknown", session.token[:-1]):
            check(await post(body, key), api, 401, "invalid_api_key")
        check(await post({**body, "model": "gpt"}), api, 404, "model_not_found")
        deep = b'{"more": ' + b"[" * 100_000
        for malformed in (b'{"model": "policy", ', b"\xff\xfe", deep):
            check(await post(malformed), api, 400)
        check(await post(b" " * (17 << 20)), api, 413)
        check(await post({**body, **too_long}), api, 400, "context_length_exceeded")
        for wrong, message in table(__file__, api):
            refused = await post({**body, **wrong})
            code = refused.json()["error"].get("code")
            assert message in check(refused, api, 400, code), wrong
        check(await found.http.post("/v1/images", content=b"{}"), "chat", 404)
        # Nothing is lost: the session is as it was, and answers.
        assert session.record.turns == {}
        assert session.record.num_tokens() == 0
        assert (await post(body)).status_code == 200
        assert len(session.record.turns) == 1


MODEL = {"model": "policy"}


async def refusal(found: Clients, body: Any, path: str = "/v1/chat/completions") -> tuple[int, str]:
    reply = await found.http.post(path, content=json.dumps({**MODEL, **body}))
    return reply.status_code, reply.json()["error"]["message"]


async def test_a_prompt_far_above_the_limit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    tokenize = Words.__call__

    def counting(words: Words, text: str, **how: Any) -> Any:
        read.append(len(text))
        return tokenize(words, text, **how)

    async with using(limit=100) as (found, *_):
        monkeypatch.setattr(Words, "__call__", counting)
        # The limit of a session decides, and not one number for every model.
        status, message = await refusal(found, {"messages": [user("go " * 500_000)]})
        assert (status, read) == (413, [])
        assert "larger than" in message
        # A body that may be within the limit is read up to the limit.
        status, message = await refusal(found, {"messages": [user("go " * 340_000)]})
        assert (status, len(read)) == (400, 1)
        assert "the limit is 100 (data.max_response_tokens)" in message


async def test_a_large_prompt_holds_up_no_other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_read = threading.Event(), threading.Event()
    tokenize = Words.__call__

    def waiting(words: Words, text: str, **how: Any) -> Any:
        if len(text) > 100_000:
            is_reading.set()
            assert may_read.wait(60)
        return tokenize(words, text, **how)

    async with using(["one"]) as (found, *_):
        monkeypatch.setattr(Words, "__call__", waiting)
        body = {**MODEL, "messages": [user("go " * 100_000)]}
        large = asyncio.ensure_future(found.http.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(is_reading.wait, 60)
        small = {**MODEL, "messages": [user("go")]}
        reply = await found.http.post("/v1/chat/completions", json=small)
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        may_read.set()
        assert (await large).json()["error"]["code"] == "context_length_exceeded"


BODIES: dict[str, Any] = table(__file__, "bodies")
VALUES: list[Any] = table(__file__, "values")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with each of its keys."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damaged(rng: random.Random, api: str, good: dict[str, Any]) -> bytes:
    body = copy.deepcopy(good)
    for _ in range(rng.choice((1, 1, 2, 5))):
        container, key = rng.choice(list(places(body)) or [(body, "x")])
        act = rng.randrange(4)
        if act == 0:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif act == 1:
            del container[key]
        elif act == 2 and isinstance(container, dict):
            container[rng.choice(["x", *container])] = container[key]
        else:
            body[rng.choice(TABLE[api]).name] = copy.deepcopy(rng.choice(VALUES))
    data = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("path", BODIES)
async def test_a_damaged_request_has_an_error_of_its_api_and_the_session_lives(path: str) -> None:
    api, fields = BODIES[path]["api"], BODIES[path]["fields"]
    rng = random.Random(path)
    sessions = Sessions()
    statuses = set()
    transport = httpx.ASGITransport(build_app(sessions))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(250):
            session, _ = open_session(CHATML, ["done"] * 100)
            headers = {"authorization": f"Bearer {session.token}"}
            with sessions.open(session):
                content = damaged(rng, api, {"model": "policy", **fields})
                reply = await client.post(path, content=content, headers=headers)
                assert reply.status_code in (200, 400, 404), content
                statuses.add(reply.status_code)
                if reply.status_code != 200:
                    error = reply.json()["error"]
                    assert error.keys() == {"message", "type", "param", "code"}, content
                    assert error["message"], content
                if number % 10:
                    continue
                good = {"model": "policy", "messages": [{"role": "user", "content": str(number)}]}
                fine = await client.post("/v1/chat/completions", json=good, headers=headers)
                assert fine.json()["choices"][0]["message"]["content"] == "done"
    assert {200, 400} <= statuses
