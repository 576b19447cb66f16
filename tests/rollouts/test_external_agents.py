"""Agents that the run does not start: programs take sessions over HTTP, and end them."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest
from composing import compose
from rollouts_support import Alphabet, Judge, Parrot, opened_rollouts, ticket_of
from test_agents import TESTS, Drawing

from async_rl.core.errors import AgentError, NotTaken, root_cause
from async_rl.core.types import Group
from async_rl.processes.gateway import announced
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.journal import Journal
from async_rl.sessions.open_sessions import Offers, Sessions, key_from
from async_rl.sessions.server import build_app

KEY = key_from("the run's token")


class Gateway:
    """A gateway whose HTTP needs no socket."""

    def __init__(self, path: Path, *, take_s: float = 60.0) -> None:
        self.config = compose("grpo_code", ["generation.group_size=2", "rollout.fn=external"])
        self.offers = Offers(KEY, take_s)
        journal = Journal(path / "gateway-0", "1")
        self.sessions = Sessions(journal.secret, journal.returning)
        self.transport = httpx.ASGITransport(cast(Any, build_app(self.sessions, self.offers)))
        self.judge = Judge()
        self.rollouts: Any = None
        self.agents = Agents(
            self.config,
            tokenizer=Alphabet(),
            sessions=self.sessions,
            environments=self.offers,
            journal=journal,
            url="http://gateway",
        )

    async def group(self, number: int = 1, attempt: int = 1, engine: Any = None) -> Group:
        asked = msgspec.structs.replace(
            ticket_of(2, tests=TESTS, max_new_tokens=99), group_id=number, attempt=attempt
        )
        async with asyncio.timeout(60):
            group: Group = await self.rollouts.group(
                asked, engine or Parrot(), written=lambda: None
            )
        return group

    async def post(self, path: str, key: str, body: Any = None, **more: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=self.transport) as client:
            headers = {"authorization": f"Bearer {key}", **more}
            return await client.post(f"http://gateway{path}", headers=headers, json=body)

    async def take(self, wait_s: float = 30.0) -> dict[str, Any]:
        reply = await self.post("/sessions", KEY, {"wait_s": wait_s})
        assert reply.status_code == 201, reply.text
        return cast(dict[str, Any], reply.json())

    async def say(self, session: dict[str, Any]) -> None:
        """One call, with the unchanged package."""
        async with (
            httpx.AsyncClient(transport=self.transport) as http,
            openai.AsyncOpenAI(
                base_url=session["base_url"],
                api_key=session["api_key"],
                http_client=http,
                max_retries=0,
            ) as client,
        ):
            messages: Any = [{"role": "user", "content": session["task"]["prompt"]}]
            await client.chat.completions.create(model=session["model"], messages=messages)

    async def end(self, session: dict[str, Any], body: Any = None) -> httpx.Response:
        path = session["session_url"].removeprefix("http://gateway")
        return await self.post(f"{path}/end", session["session_key"], body)


@contextlib.asynccontextmanager
async def opened(path: Path, **more: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(path, **more)
    maker = gateway.agents.sample
    async with opened_rollouts(gateway.config, gateway.judge, maker=maker) as gateway.rollouts:
        yield gateway
    assert gateway.sessions.gauges["open"] == 0


async def cause_of(made: asyncio.Task[Group]) -> BaseException:
    """Return the cause of the failure of a group."""
    with pytest.raises((ExceptionGroup, TimeoutError)) as caught:
        await made
    return root_cause(caught.value)


async def test_programs_take_the_sessions_of_a_group_and_end_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        none = await gateway.post("/sessions", KEY)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_session")
        assert none.headers["retry-after"] == "1"
        waiting = asyncio.create_task(gateway.take())
        await asyncio.sleep(0)
        made = asyncio.create_task(gateway.group())
        first, second = await waiting, await gateway.take()
        assert sorted(s["task"]["sample"] for s in (first, second)) == [0, 1]
        assert first["api_key"] != second["api_key"]
        for session in (first, second):
            await gateway.say(session)
        reward = await gateway.post("/v1/session/reward", first["session_key"], {"style": 0.25})
        assert reward.status_code == 200
        for session in (first, second):
            assert (await gateway.end(session)).status_code == 200
        group = await made
        # A program whose answer was lost ends its session again, which is gone by now.
        for session in (first, second):
            again = await gateway.end(session)
            assert (again.status_code, again.json()) == (200, {"object": "session.ended"})
        rewards = [sample.score.reward for sample in group.trajectories]
        assert rewards[first["task"]["sample"]] == 0.25
        # The other one posted none, so its last answer is scored.
        assert rewards[second["task"]["sample"]] == 1.0
        assert gateway.judge.texts == ["u"]
        late = await gateway.post("/v1/session/reward", first["session_key"], 1.0)
        assert late.status_code == 401


async def test_a_full_disk_refuses_an_answer_and_trains_none_of_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        made = asyncio.create_task(gateway.group(engine=Drawing(3, limit=99)))
        session, other = await gateway.take(), await gateway.take()
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        (file,) = tmp_path.glob("gateway-0/*/1")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Room for a part of the next record.
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 30, limits[1]))
        try:
            for stream in (False, True):
                asked = {**chat, "stream": stream}
                refused = await gateway.post("/v1/chat/completions", session["api_key"], asked)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "File too large; free space there" in refused.json()["error"]["message"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for one in (session, other):
            await gateway.say(one)
            await gateway.end(one)
        samples = (await made).trajectories
        assert sorted(int(t) for s in samples for t in s.token_ids[s.loss_mask] if t) == [5, 6]


async def test_only_the_key_of_the_sessions_opens_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        made = asyncio.create_task(gateway.group())
        session = await gateway.take()
        # Neither the run's token nor that of a session; a session's requests do not take the key.
        for key in ("", "x", "the run's token", session["api_key"]):
            refused = await gateway.post("/sessions", key)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await gateway.post("/v1/session/end", KEY)).status_code == 401
        assert (await gateway.post("/v1/chat/completions", KEY, {})).status_code == 401
        for body in ({"wait_s": -1}, {"wait_s": 1e9}, [1]):
            assert (await gateway.post("/sessions", KEY, body)).status_code == 400
        made.cancel()
        await asyncio.gather(made, return_exceptions=True)

        # A run that starts its agents itself hands out none.
        gateway.transport = httpx.ASGITransport(cast(Any, build_app(gateway.sessions)))
        refused = await gateway.post("/sessions", KEY)
        assert refused.status_code == 404
        assert "rollout.fn=external" in refused.json()["error"]["message"]


async def test_a_failed_program_is_a_failed_attempt_with_its_reason(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        made = asyncio.create_task(gateway.group())
        session = await gateway.take()
        await gateway.say(session)
        assert (await gateway.end(session, {"error": "the site is down"})).status_code == 200
        cause = await cause_of(made)
        assert isinstance(cause, AgentError)
        assert "the site is down" in str(cause)


async def test_a_session_that_nobody_takes_ends_its_group(tmp_path: Path) -> None:
    async with opened(tmp_path, take_s=1.0) as gateway:
        made = asyncio.create_task(gateway.group())
        # One is taken, the other is not, so the group cannot be complete.
        session = await gateway.take()
        await gateway.say(session)
        cause = await cause_of(made)
        assert isinstance(cause, NotTaken)
        assert "no program took the session within 1 s" in str(cause)
        gone = await gateway.post("/v1/chat/completions", session["api_key"], {})
        assert gone.status_code == 401
        assert gateway.offers.take(print) is None


def test_the_file_of_a_gateway_is_its_owner_s_and_ends_with_it(tmp_path: Path) -> None:
    def context(name: str) -> Any:
        log = SimpleNamespace(info=lambda *_: 0)
        return SimpleNamespace(run_dir=tmp_path, name=name, token="the run's token", log=log)

    file = tmp_path / "gateways" / "gateway-0.json"
    with announced(context("gateway-0"), "http://zero"):
        assert file.stat().st_mode & 0o077 == 0
        assert msgspec.json.decode(file.read_bytes())["api_key"] == KEY
        with announced(context("gateway-1"), "http://one"):
            assert len(list(file.parent.iterdir())) == 2
        # Scaled down.
        assert list(file.parent.iterdir()) == [file]
        # It was killed, and its successor starts before the old process has ended.
        successor = announced(context("gateway-0"), "http://again")
        successor.__enter__()
    assert msgspec.json.decode(file.read_bytes())["sessions_url"] == "http://again/sessions"
    successor.__exit__(None, None, None)
    assert not file.exists()
