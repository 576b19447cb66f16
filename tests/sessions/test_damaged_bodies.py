"""Thousands of damaged requests over all paths: each is answered in the form of its API."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sessions_support import CHATML, open_session
from tables import table

from async_rl.sessions.forms.parameters import TABLE
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app

MESSAGES: list[Any] = table(__file__, "messages")
CLAUDE: list[Any] = table(__file__, "claude")
ITEMS: list[Any] = table(__file__, "items")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FUNCTION = {"type": "function", "name": "add", "parameters": SCHEMA}
SPACE = {"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "custom", "name": "c"}]}
USE = {"name": "add", "input_schema": SCHEMA}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "chat",
        {
            "messages": MESSAGES,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "response_format": FORMAT,
            "stream_options": {"include_usage": True},
            "stop": ["x"],
            "logit_bias": {"1": 1.0},
        },
    ),
    "/v1/responses": (
        "responses",
        {
            "input": ITEMS,
            "tools": [FUNCTION, SPACE, {"type": "local_shell"}, {"type": "web_search"}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "reasoning": {"effort": "low"},
            "include": ["reasoning.encrypted_content"],
        },
    ),
    "/v1/completions": ("completions", {"prompt": [[1, 2], "a b"], "n": 2, "stop": "x"}),
    "/v1/messages": (
        "messages",
        {
            "messages": CLAUDE,
            "max_tokens": 9,
            "system": [{"type": "text", "text": "s"}],
            "tools": [USE, {"type": "web_search_20250305", "name": "w"}],
            "tool_choice": {"type": "tool", "name": "add"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        },
    ),
    "/v1/messages/count_tokens": ("count_tokens", {"messages": CLAUDE, "tools": [USE]}),
    "/inference/v1/generate": (
        "generate",
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop": ["x"], "n": 2}},
    ),
}
VALUES: list[Any] = [None, True, 0, -1, 1.5, 1e308, 2**70, "", "x", "\x00", "\u00e9" * 50]
VALUES += [[], [[]], [None], [1, "a"], {}, {"a": None}, {"type": "x"}, {"type": "function"}]
VALUES += [[{"type": "text"}], [{"role": "user"}], {"content": 1}, {"name": []}, "9" * 400]


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
    api, fields = BODIES[path]
    rng = random.Random(path)
    sessions = Sessions()
    statuses = set()
    transport = httpx.ASGITransport(build_app(sessions))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for number in range(500):
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
