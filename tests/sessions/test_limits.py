"""A large or slow request holds up no other one, and is refused before it is worked on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from clients_support import Clients, use, user
from sessions_support import Policy, Words

from async_rl.sessions.calls import Call, Context
from async_rl.sessions.session import Session

MODEL = {"model": "policy"}


async def refusal(found: Clients, body: Any, path: str = "/v1/chat/completions") -> tuple[int, str]:
    reply = await found.http.post(path, content=json.dumps({**MODEL, **body}))
    return reply.status_code, reply.json()["error"]["message"]


def test_a_prompt_far_above_the_limit_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    tokenize = Words.__call__

    def counting(words: Words, text: str, **how: Any) -> Any:
        read.append(len(text))
        return tokenize(words, text, **how)

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        monkeypatch.setattr(Words, "__call__", counting)
        status, _ = await refusal(found, {"messages": [user("go " * 5_000_000)]})
        assert (status, read) == (413, [])
        # The limit of a session decides, and not one number for every model.
        status, message = await refusal(found, {"messages": [user("go " * 500_000)]})
        assert (status, read) == (413, [])
        assert "larger than" in message
        # A body that may be within the limit is read up to the limit.
        status, message = await refusal(found, {"messages": [user("go " * 340_000)]})
        assert (status, len(read)) == (400, 1)
        assert "the limit is 100 (data.max_response_tokens)" in message
        policy.say("fine")
        reply = await found.http.post(
            "/v1/chat/completions", json={**MODEL, "messages": [user("go")]}
        )
        assert reply.status_code == 200

    use(agent, limit=100)


def test_a_large_prompt_is_read_while_other_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    is_reading, may_read = threading.Event(), threading.Event()
    tokenize = Words.__call__

    def waiting(words: Words, text: str, **how: Any) -> Any:
        if len(text) > 100_000:
            is_reading.set()
            assert may_read.wait(60)
        return tokenize(words, text, **how)

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        monkeypatch.setattr(Words, "__call__", waiting)
        body = {**MODEL, "messages": [user("go " * 100_000)]}
        large = asyncio.ensure_future(found.http.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(is_reading.wait, 60)
        small = {**MODEL, "messages": [user("go")]}
        reply = await found.http.post("/v1/chat/completions", json=small)
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        may_read.set()
        assert (await large).json()["error"]["code"] == "context_length_exceeded"

    use(agent, ["one"])


def test_stop_texts_and_answers_have_a_limit_before_the_policy_writes() -> None:
    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        for stop in ("x" * 100_000, ["x" * 100] * 50):
            status, message = await refusal(found, {"messages": [user("go")], "stop": stop})
            assert status == 400
            assert "stop texts have more than 4096 characters" in message
        prompts = {"prompt": ["go"] * 50, "n": 128}
        status, message = await refusal(found, prompts, "/v1/completions")
        assert status == 400
        assert "6400 more are above its limit of 100" in message
        assert policy.served == []

    use(agent)


def test_the_end_of_a_stop_text_is_found_without_reading_the_answer_once_per_token() -> None:
    decoded: list[int] = []

    async def agent(found: Clients, session: Session, policy: Policy) -> None:
        decode = session.chat.decode

        def counting(ids: Any, **how: Any) -> str:
            decoded.append(len(ids))
            return decode(ids, **how)

        session.chat.decode = counting  # type: ignore[method-assign]
        ids = session.chat.tokenizer("a b " * 1000 + "end x", add_special_tokens=False)
        call = Call(context=Context(parent=None, token_ids=np.array([1])), stops=("end",))
        text, num_kept = session.chat.text_of(np.array(ids["input_ids"]), call)
        assert (text, num_kept) == ("a b " * 1000, 4001)
        assert len(decoded) < 20

    use(agent)
