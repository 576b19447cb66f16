"""Thousands of damaged requests over all paths: each is answered in the form of its API."""

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
