"""Bad input over every API: each has its error in the API's own form, and no session changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from clients_support import Clients, use, user
from sessions_support import Policy

from async_rl.sessions.session import Session

BAD = yaml.safe_load(Path(__file__).with_name("bad_requests.yaml").read_text())
USER = user("go")
LONG = "go " * 3000
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [USER]},
        {"messages": [{**USER, "content": LONG}]},
    ),
    "responses": ("/v1/responses", {"input": "go"}, {"input": LONG}),
    "completions": ("/v1/completions", {"prompt": "go"}, {"prompt": LONG}),
    "messages": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 900},
        {"messages": [{**USER, "content": LONG}]},
    ),
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
def test_each_bad_request_is_refused_in_the_form_of_its_api(api: str) -> None:
    path, fields, too_long = FORMS[api]
    body = {"model": "policy", **fields}

    async def agent(found: Clients, session: Session, _: Policy) -> None:
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
        for wrong, message in BAD[api]:
            refused = await post({**body, **wrong})
            code = refused.json()["error"].get("code")
            assert message in check(refused, api, 400, code), wrong
        check(await found.http.post("/v1/images", content=b"{}"), "chat", 404)
        # Nothing is lost: the session is as it was, and answers.
        assert session.record.turns == {}
        assert session.record.num_tokens() == 0
        assert (await post(body)).status_code == 200
        assert len(session.record.turns) == 1

    use(agent, ["one"], limit=2000)


def test_a_slow_reader_of_a_stream_gets_all_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, fields, _ = FORMS["chat"]

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        body = {"model": "policy", **fields, "stream": True}
        is_written = asyncio.Event()
        finish = session.record.finish

        def finished(*args: Any, **more: Any) -> None:
            finish(*args, **more)
            is_written.set()

        monkeypatch.setattr(session.record, "finish", finished)
        async with found.http.stream("POST", path, json=body) as slow:
            pieces = aiter(slow.aiter_text())
            first = await anext(pieces)
            # It reads no further while the session answers another call.
            async with asyncio.timeout(30):
                await is_written.wait()
            policy.say("two")
            other = {"model": "policy", "messages": [user("else")]}
            reply = await found.http.post("/v1/chat/completions", json=other)
            assert reply.json()["choices"][0]["message"]["content"] == "two"
            whole = first + "".join([piece async for piece in pieces])
        assert "w0" in whole
        assert "w199" in whole
        assert '"type":"error"' not in whole
        assert len(session.record.turns) == 2

    use(agent, [" ".join(f"w{i}" for i in range(200))], limit=2000)
