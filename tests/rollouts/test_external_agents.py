"""Agents that the run does not start: programs take sessions over HTTP, and end them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest
from composing import compose, compose_unchecked
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts_support import (
    Alphabet,
    Judge,
    Parrot,
    completion,
    opened_rollouts,
    process,
    ticket_of,
)
from test_agents import TESTS, Drawing

from async_rl.config.checks.run import problems
from async_rl.core.errors import AgentError, DataError, NotTaken, root_cause
from async_rl.core.types import Group
from async_rl.processes.gateway import announced
from async_rl.protocol.generator import Completion
from async_rl.rollouts.agents import Agents
from async_rl.rollouts.groups import Groups
from async_rl.rollouts.journal import Journal
from async_rl.sessions.offers import Offers, key_from
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app

KEY = key_from("the run's token")
AGAIN = {"x-stainless-retry-count": "1"}


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


def run(path: Path, do: Callable[[Gateway], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        gateway = Gateway(path, **more)
        maker = gateway.agents.sample
        async with opened_rollouts(gateway.config, gateway.judge, maker=maker) as rollouts:
            gateway.rollouts = rollouts
            await do(gateway)
        assert gateway.sessions.gauges["open"] == 0

    asyncio.run(main())


@contextlib.asynccontextmanager
async def failing(gateway: Gateway) -> AsyncIterator[list[BaseException]]:
    """A group that is made meanwhile, and the cause of its failure afterwards."""
    causes: list[BaseException] = []
    made = asyncio.create_task(gateway.group())
    yield causes
    with pytest.raises((ExceptionGroup, TimeoutError)) as caught:
        await made
    causes.append(root_cause(caught.value))


def test_programs_take_the_sessions_of_a_group_and_end_them(tmp_path: Path) -> None:
    async def do(gateway: Gateway) -> None:
        made = asyncio.create_task(gateway.group())
        first, second = await gateway.take(), await gateway.take()
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

    run(tmp_path, do)


class Lives:
    """The lives of one gateway, whose engine draws a letter once. A request whose answer is lost is
    sent again to the next life, as the packages do.
    """

    def __init__(self, path: Path, lost: int, engine: Any = None) -> None:
        self._path, self._lost = path, lost
        self._engine = engine or Drawing(3, limit=99)
        self.num_requests = 0
        self.num_lives = 0
        self.making: Any = None

    async def begin(self) -> None:
        self.num_lives += 1
        self.gateway = Gateway(self._path)
        maker = self.gateway.agents.sample
        self._stack = contextlib.AsyncExitStack()
        opened = opened_rollouts(self.gateway.config, self.gateway.judge, maker=maker)
        self.gateway.rollouts = await self._stack.enter_async_context(opened)
        group = self.gateway.group(attempt=self.num_lives, engine=self._engine)
        self.making = asyncio.create_task(group)

    async def kill(self) -> None:
        self.making.cancel()
        await asyncio.gather(self.making, return_exceptions=True)
        await self._stack.aclose()

    async def send(self, path: str, key: str, body: Any) -> str:
        reply = await self.gateway.post(path, key, body)
        self.num_requests += 1
        if self.num_requests == self._lost:
            await self.kill()
            await self.begin()
            again = await self.gateway.post(path, key, body, **AGAIN)
            assert reply.status_code == 200
            assert texts_in(again.text) == texts_in(reply.text)
            reply = again
        assert reply.status_code == 200, reply.text
        return texts_in(reply.text)

    async def program(self) -> None:
        """A chat, a stream, a response that names an earlier one, a reward and an end."""
        session = await self.gateway.take()
        key, owner = session["api_key"], session["session_key"]
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        first = await self.send("/v1/chat/completions", key, chat)
        chat["messages"] += [{"role": "assistant", "content": first}]
        chat["messages"] += [{"role": "user", "content": "on"}]
        await self.send("/v1/chat/completions", key, {**chat, "stream": True})
        asked = {"model": "policy", "input": "so"}
        named = await self.gateway.post("/v1/responses", key, asked)
        more = {"previous_response_id": named.json()["id"]}
        await self.send("/v1/responses", key, {**asked, **more})
        await self.send("/v1/session/reward", owner, 0.5)
        await self.send("/v1/session/end", owner, {})


def texts_in(body: str) -> str:
    return "".join(re.findall(r'"(?:content|text)":"(\w+)"', body))


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5, 10])
def test_a_session_goes_on_in_the_next_life_of_its_gateway(tmp_path: Path, lost: int) -> None:
    async def main() -> None:
        lives = Lives(tmp_path, lost)
        await lives.begin()
        for _ in range(2):
            await lives.program()
        group = await lives.making
        # No answer was drawn twice, and each is trained once.
        trained = [int(t) for s in group.trajectories for t in s.token_ids[s.loss_mask] if t]
        assert sorted(trained) == list(range(3, 11))
        assert [sample.score.reward for sample in group.trajectories] == [0.5, 0.5]
        assert lives.num_lives == 2
        await lives.kill()

    asyncio.run(main())


def test_an_answer_that_a_kill_cut_is_continued_when_it_is_sent_again(tmp_path: Path) -> None:
    hung = asyncio.Event()

    class Pieces(Parrot):
        async def generate(
            self, request_id: str, before: Any, num_samples: int, sampling: Any
        ) -> AsyncGenerator[Completion, None]:
            is_first = len(before) < 32
            if not is_first and lives.num_lives == 1:
                hung.set()
                await asyncio.Event().wait()
            num = sampling.max_new_tokens if is_first else 8
            yield completion(*[lives.num_lives] * num, is_truncated=is_first)

    async def main() -> None:
        await lives.begin()
        session = await lives.gateway.take()
        # An answer that a text may stop is written in pieces.
        asked: dict[str, Any] = {"model": "policy", "stop": "never"}
        asked["messages"] = [{"role": "user", "content": "hi"}]
        stream = ("/v1/chat/completions", session["api_key"], {**asked, "stream": True})
        cut = asyncio.ensure_future(lives.gateway.post(*stream))
        await hung.wait()
        cut.cancel()
        await lives.kill()
        await lives.begin()
        reply = await lives.gateway.post(*stream, **AGAIN)
        # The engine wrote the second piece only.
        assert texts_in(reply.text) == "a" * 32 + "b" * 8
        await lives.kill()

    lives = Lives(tmp_path, 0, Pieces())
    asyncio.run(main())


def test_of_n_answers_one_of_which_fails_none_is_trained_in_any_life(tmp_path: Path) -> None:
    class Refusing(Drawing):
        async def generate(
            self, request_id: str, before: Any, num_samples: int, sampling: Any
        ) -> AsyncGenerator[Completion, None]:
            if request_id.endswith("/1.0"):
                # After the other answer.
                await asyncio.sleep(0.05)
                raise DataError("a token that the model does not have")
            async for done in super().generate(request_id, before, num_samples, sampling):
                yield done

    async def main() -> None:
        lives = Lives(tmp_path, 0, Refusing(3, limit=99))
        await lives.begin()
        texts = []
        for is_killed in (True, False):
            session = await lives.gateway.take()
            chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            asked = ("/v1/chat/completions", session["api_key"])
            refused = await lives.gateway.post(*asked, {**chat, "n": 2})
            assert refused.status_code == 400
            assert "a token that the model" in refused.json()["error"]["message"]
            if is_killed:
                await lives.kill()
                await lives.begin()
            texts.append(await lives.send(*asked, chat))
            assert (await lives.gateway.end(session)).status_code == 200
        group = await lives.making
        trained = [s.token_ids[s.loss_mask].tolist() for s in group.trajectories]
        assert ["".join(chr(96 + i) for i in ids if i) for ids in trained] == texts
        left_out = [call.left_out for s in group.trajectories for call in s.calls]
        assert left_out == ["", "unread", ""]
        await lives.kill()

    asyncio.run(main())


def test_a_full_disk_refuses_an_answer_with_the_cause_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        lives = Lives(tmp_path, 0)
        await lives.begin()
        session = await lives.gateway.take()
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        chat = ("/v1/chat/completions", session["api_key"])
        (file,) = tmp_path.glob("gateway-0/*/1")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Room for a part of the next record.
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 30, limits[1]))
        try:
            for stream in (False, True):
                asked = {"model": "policy", "messages": messages, "stream": stream}
                refused = await lives.gateway.post(*chat, asked)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "File too large; free space there" in refused.json()["error"]["message"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        first = await lives.send(*chat, {"model": "policy", "messages": messages})
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "on"}]
        await lives.kill()
        await lives.begin()
        await lives.send(*chat, {"model": "policy", "messages": messages})
        assert await lives.gateway.end(session)
        for_other = await lives.gateway.take()
        await lives.gateway.say(for_other)
        await lives.gateway.end(for_other)
        sample = (await lives.making).trajectories[0]
        # The two answers that were refused are not trained, and the rest is one segment.
        letters = [int(token) for token in sample.token_ids[sample.loss_mask] if token]
        assert letters == [5, 6]
        await lives.kill()

    asyncio.run(main())


def test_only_the_key_of_the_sessions_opens_one(tmp_path: Path) -> None:
    async def do(gateway: Gateway) -> None:
        made = asyncio.create_task(gateway.group())
        session = await gateway.take()
        # Neither the run's token nor that of a session; a session's requests do not take the key.
        for key in ("", "x", "the run's token", session["api_key"]):
            refused = await gateway.post("/sessions", key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
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

    run(tmp_path, do)
    assert "the run's token" not in KEY


def test_a_program_may_wait_and_is_told_to_ask_again(tmp_path: Path) -> None:
    async def do(gateway: Gateway) -> None:
        none = await gateway.post("/sessions", KEY)
        assert (none.status_code, none.json()["error"]["code"]) == (503, "no_session")
        assert none.headers["retry-after"] == "1"
        waiting = asyncio.create_task(gateway.take())
        await asyncio.sleep(0)
        async with failing(gateway):
            session = await waiting
            await gateway.end(session, {"error": "done"})

    run(tmp_path, do)


def test_a_failed_program_is_a_failed_attempt_with_its_reason(tmp_path: Path) -> None:
    async def do(gateway: Gateway) -> None:
        async with failing(gateway) as causes:
            session = await gateway.take()
            await gateway.say(session)
            assert (await gateway.end(session, {"error": "the site is down"})).status_code == 200
        assert isinstance(causes[0], AgentError)
        assert "the site is down" in str(causes[0])
        async with failing(gateway) as causes:
            session = await gateway.take()
            assert (await gateway.end(session)).status_code == 200
            assert (await gateway.end(session)).status_code == 200
        assert "without a call that is trained" in str(causes[0])

    run(tmp_path, do)


def test_a_session_that_nobody_takes_goes_back_and_does_not_count(tmp_path: Path) -> None:
    failures: list[Any] = []

    async def do(gateway: Gateway) -> None:
        async def call(request: Any, **_: float) -> None:
            failures.append(request)

        context = process(gateway.config, call)
        groups = Groups(context, gateway.rollouts, engine=Parrot, limit=asyncio.timeout)
        working = asyncio.create_task(groups.roll_out(ticket_of(2, tests=TESTS)))
        # One is taken, the other is not, so the group cannot be complete.
        session = await gateway.take()
        await gateway.say(session)
        await working
        gone = await gateway.post("/v1/chat/completions", session["api_key"], {})
        assert gone.status_code == 401
        assert gateway.offers.take(print) is None

    run(tmp_path, do, take_s=1.0)
    (failure,) = failures
    assert failure.reason == "not_taken"
    assert "no program took the session within 1 s" in failure.message
    assert issubclass(NotTaken, AgentError)


def test_the_setting_is_a_word_and_needs_no_program() -> None:
    assert list(problems(compose_unchecked("grpo_code", ["rollout.fn=external"]))) == []
    agent = compose("grpo_code", ["rollout.fn=external"]).agent
    assert (agent.is_used, agent.is_external, agent.name, agent.workers) == (
        True,
        True,
        "external",
        0,
    )


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), num_programs=st.integers(1, 4))
def test_programs_that_come_leave_and_fail_never_share_a_session(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_programs: int
) -> None:
    rng = random.Random(seed)
    keys: list[str] = []

    async def program(gateway: Gateway) -> None:
        while True:
            wait_s = rng.choice((0.0, 5.0))
            taking = asyncio.create_task(gateway.post("/sessions", KEY, {"wait_s": wait_s}))
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            if rng.random() < 0.2 and not taking.done():
                # It leaves while it waits. What it was not handed must be there for others.
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
                continue
            reply = await taking
            if reply.status_code != 201:
                await asyncio.sleep(0.001)
                continue
            session = reply.json()
            keys.append(session["api_key"])
            # Another member of the group may have failed meanwhile, which ends this session.
            with contextlib.suppress(openai.APIStatusError):
                await gateway.say(session)
            ended = {"error": "bad luck"} if rng.random() < 0.1 else None
            assert (await gateway.end(session, ended)).status_code in (200, 401)

    async def do(gateway: Gateway) -> None:
        programs = [asyncio.create_task(program(gateway)) for _ in range(num_programs)]
        numbers = itertools.count(1)
        complete = 0
        try:
            while complete < 3:
                try:
                    group = await gateway.group(next(numbers))
                except ExceptionGroup as error:
                    cause = root_cause(error)
                    assert isinstance(cause, AgentError)
                    assert "bad luck" in str(cause)
                else:
                    complete += 1
                    assert len(group.trajectories) == 2
                for task in programs:
                    if task.done():
                        task.result()
        finally:
            for task in programs:
                task.cancel()
            await asyncio.gather(*programs, return_exceptions=True)
        assert len(keys) == len(set(keys))
        assert not gateway.offers.taken
        assert not gateway.offers.waiting

    run(tmp_path_factory.mktemp("run"), do, take_s=30.0)


def test_the_file_of_a_gateway_is_its_owner_s_and_lasts_as_long_as_the_gateway(
    tmp_path: Path,
) -> None:
    def context(name: str) -> Any:
        log = SimpleNamespace(info=lambda *_: 0)
        return SimpleNamespace(run_dir=tmp_path, name=name, token="the run's token", log=log)

    def urls() -> dict[str, str]:
        files = (tmp_path / "gateways").iterdir()
        return {file.name: msgspec.json.decode(file.read_bytes())["sessions_url"] for file in files}

    with announced(context("gateway-0"), "http://zero"):
        file = tmp_path / "gateways" / "gateway-0.json"
        assert file.stat().st_mode & 0o077 == 0
        assert msgspec.json.decode(file.read_bytes())["api_key"] == KEY
        with announced(context("gateway-1"), "http://one"):
            assert sorted(urls()) == ["gateway-0.json", "gateway-1.json"]
        # Scaled down.
        assert urls() == {"gateway-0.json": "http://zero/sessions"}
        # It was killed, and its successor starts before the old process has ended.
        successor = announced(context("gateway-0"), "http://again")
        successor.__enter__()
    assert urls() == {"gateway-0.json": "http://again/sessions"}
    (tmp_path / "gateways" / "gateway-0.json").unlink()
    successor.__exit__(None, None, None)
    assert urls() == {}
