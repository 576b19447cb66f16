"""Bad input over every API: each has its error in the API's own form, and no session changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from sessions_support import Policy, endpoint, open_session

from async_rl.sessions.session import Session

USER = {"role": "user", "content": "go"}
# An assistant that called a tool without a name, and a result: no template can show that.
ODD = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "responses": ("/v1/responses", {"input": "go"}),
    "completions": ("/v1/completions", {"prompt": "go"}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
}
LONG = "go " * 3000
TOO_LONG: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{**USER, "content": LONG}]},
    "responses": {"input": LONG},
    "completions": {"prompt": LONG},
    "messages": {"messages": [{**USER, "content": LONG}]},
}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add"}]}
CONTRADICTIONS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"messages": [USER, ODD]},
        {"tools": [{"function": "add"}], "tool_choice": {"function": {"name": "add"}}},
    ],
    "responses": [
        {"previous_response_id": "resp_of_another_session"},
        {"text": {"format": "text"}},
    ],
    "messages": [
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}, 1]}]},
        {"messages": [USER, CALLED, USER]},
    ],
}


@contextlib.asynccontextmanager
async def opened(texts: list[str]) -> AsyncIterator[tuple[httpx.AsyncClient, Session, Policy]]:
    session, policy = open_session(texts=texts, limit=2000)
    async with endpoint(session) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client, session, policy


def check(reply: httpx.Response, api: str, status: int, code: str | None) -> None:
    """The error in the form of the API, and of the packages that read it."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    error = body["error"]
    assert error["message"]
    if api == "messages":
        assert body["type"] == "error"
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        assert error["type"] == kinds.get(status, "invalid_request_error")
    else:
        assert error.keys() >= {"message", "type", "param", "code"}
        assert error["code"] == code


@pytest.mark.parametrize("api", APIS)
def test_each_bad_request_is_refused_in_the_form_of_its_api(api: str) -> None:
    path, fields = APIS[api]
    body = {"model": "policy", **fields}

    async def main() -> None:
        async with opened(["one"]) as (client, session, _):

            async def post(token: str, content: Any) -> httpx.Response:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                headers = {"authorization": f"Bearer {token}"}
                if api == "messages" or not token:
                    headers = {"x-api-key": token}
                return await client.post(path, content=data, headers=headers)

            own = session.token
            for token in ("", "sk-unknown", own[:-1]):
                check(await post(token, body), api, 401, "invalid_api_key")
            check(await post(own, {**body, "model": "gpt"}), api, 404, "model_not_found")
            check(await post(own, b'{"model": "policy", '), api, 400, None)
            check(await post(own, b"\xff\xfe"), api, 400, None)
            check(await post(own, b"[" * 100_000), api, 400, None)
            check(await post(own, b" " * (17 << 20)), api, 413, None)
            too_long = {**body, **TOO_LONG[api]}
            check(await post(own, too_long), api, 400, "context_length_exceeded")
            for contradiction in CONTRADICTIONS.get(api, ()):
                wrong = await post(own, {**body, **contradiction})
                assert wrong.status_code in (400, 404)
                check(wrong, api, wrong.status_code, wrong.json()["error"]["code"])
            # Nothing is lost: the session is as it was, and answers.
            assert session.record.turns == {}
            assert (await post(own, body)).status_code == 200
            assert len(session.record.turns) == 1

    asyncio.run(main())


def test_the_packages_raise_the_errors_that_their_users_know() -> None:
    async def main() -> None:
        async with opened([]) as (client, session, _):
            url = str(client.base_url).rstrip("/")
            unknown = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
            known = unknown.with_options(api_key=session.token)
            for of_openai in (
                lambda c: c.chat.completions.create(model="policy", messages=[USER]),
                lambda c: c.responses.create(model="policy", input="go"),
                lambda c: c.completions.create(model="policy", prompt="go"),
            ):
                with pytest.raises(openai.AuthenticationError):
                    await of_openai(unknown)
            with pytest.raises(openai.NotFoundError) as missing:
                await known.responses.create(model="gpt", input="go")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                await known.completions.create(model="policy", prompt=LONG)
            assert refused.value.code == "context_length_exceeded"
            claude = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
            message: Any = {"model": "policy", "max_tokens": 9, "messages": [USER]}
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(**message)
            own = claude.with_options(api_key=session.token)
            with pytest.raises(anthropic.NotFoundError):
                await own.messages.create(**{**message, "model": "claude"})
            long = {**message, "messages": [{**USER, "content": LONG}]}
            with pytest.raises(anthropic.BadRequestError):
                await own.messages.create(**long)
            for package in (unknown, known, claude, own):
                await package.close()

    asyncio.run(main())


@pytest.mark.parametrize("api", APIS)
def test_a_slow_reader_of_a_stream_gets_all_and_holds_up_nobody(
    api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields = APIS[api]
    text = " ".join(f"w{i}" for i in range(200))

    async def main() -> None:
        async with opened([text, "two"]) as (client, session, policy):
            headers = {"authorization": f"Bearer {session.token}"}
            body = {"model": "policy", **fields, "stream": True}
            if api in ("messages", "completions"):
                body["max_tokens"] = 900
            is_written = asyncio.Event()
            finish = session.record.finish

            def finished(*args: Any, **more: Any) -> None:
                finish(*args, **more)
                is_written.set()

            monkeypatch.setattr(session.record, "finish", finished)
            async with client.stream("POST", path, json=body, headers=headers) as slow:
                pieces = aiter(slow.aiter_text())
                first = await anext(pieces)
                # It reads no further while the session answers another call.
                async with asyncio.timeout(30):
                    await is_written.wait()
                policy.say("two")
                other = {"model": "policy", "messages": [{**USER, "content": "else"}]}
                reply = await client.post("/v1/chat/completions", json=other, headers=headers)
                assert reply.json()["choices"][0]["message"]["content"] == "two"
                whole = first + "".join([piece async for piece in pieces])
            assert "w0" in whole
            assert "w199" in whole
            assert '"type":"error"' not in whole
            assert len(session.record.turns) == 2

    asyncio.run(main())
