"""Commands of agents in a jail, which hostile agents try to leave."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from composing import compose

from async_rl.core.errors import AgentError
from async_rl.rollouts.environments import open_environments
from async_rl.sessions.endpoint import Endpoint

HOSTILE = Path(__file__).with_name("hostile_agent.py")
SECRET = "WANDB_API_KEY"


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[tuple[Endpoint, list[bytes]]]:
    """An endpoint that notes the requests of its agent."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (size,) = [
            int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"
        ]
        requests.append(head + await reader.readexactly(size))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Endpoint.of(f"http://127.0.0.1:{port}", "sk-agent", "session-owner"), requests


def play(*command: str) -> list[bytes]:
    agent = compose("grpo_code", [f"rollout.fn=[{','.join(['jail', *command])}]"]).agent

    async def main() -> list[bytes]:
        async with gateway() as (endpoint, requests):
            other = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            async with other:
                given = [str(Path.home()), os.getcwd(), other.sockets[0].getsockname()[1]]
                words = [w.replace("GIVEN", json.dumps(given)) for w in agent.command]
                environments = open_environments(dataclasses.replace(agent, command=words))
                await environments.run(endpoint, {"prompt": "go"})
            return requests

    # As the processes of a run have it.
    before = os.umask(0o077)
    try:
        return asyncio.run(main())
    finally:
        os.umask(before)


def test_an_agent_in_a_jail_reaches_its_endpoint_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    (request,) = play(sys.executable, str(HOSTILE), "GIVEN", SECRET)
    head, _, body = request.partition(b"\r\n\r\n")
    assert b"Bearer sk-agent" in head
    found: dict[str, Any] = json.loads(body)
    # The folders above the interpreter are there, and nothing else in them.
    if isinstance(found["home"], list):
        assert set(found["home"]) <= {".pyenv"}, "the interpreter"
    assert set(found["run"] if isinstance(found["run"], list) else []) <= {"tests", ".venv"}
    assert found["other port"] == "ConnectionRefusedError"
    assert found["network"] == "OSError", "unreachable"
    assert (found["secret"], found["session key"]) == (None, [])
    assert found["processes"] == [1, 2], "its own"
    assert found["system"] == "OSError"
    assert found["agent"] == "OSError", "read-only"
    assert found["mount"] == -1
    assert found["root"] == "PermissionError"
    assert found["scratch"] == 4
    assert found["leaves"] == "left"
    assert HOSTILE.read_text().startswith('"""An agent that tries')


def test_the_failure_of_a_jailed_agent_is_its_attempt_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "fail")
    with pytest.raises(AgentError, match="exited with code 1"):
        play(sys.executable, str(HOSTILE), "GIVEN", SECRET)
    with pytest.raises(AgentError, match="is not a program"):
        play("no-such-program")
    with pytest.raises(AgentError, match=r"exited with code 2: .*can.t open file"):
        play(sys.executable, "/no/such/agent.py")
