"""Groups that agents make: real environments in processes of their own, over the real endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import re
import socket
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from composing import compose, compose_unchecked
from rollouts_support import Alphabet, Judge, Parrot, completion, opened_rollouts, ticket_of

from async_rl.config.checks.run import problems
from async_rl.core.errors import AgentError, ConfigError, EngineDead, Unavailable, root_cause
from async_rl.core.machine import this_machine
from async_rl.core.support import EVERYTHING, Support
from async_rl.core.types import NO_VERSION, AssertTest, CodeTest, Group, Sampling
from async_rl.generation.engine import one_completion
from async_rl.launchers.preflight.checks import preflight
from async_rl.observability.activity import Activity
from async_rl.protocol.generator import (
    CallsRead,
    Completion,
    Continuation,
    EngineVersion,
    ReadCalls,
    WatchVersion,
)
from async_rl.protocol.membership import Member, Members
from async_rl.rollouts.agents import Agents, returned_rewards
from async_rl.rollouts.environments import Workers, open_environments, variables
from async_rl.rollouts.journal import Journal
from async_rl.rollouts.remote import RemoteEngines
from async_rl.runtime.directory import Directory
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app
from async_rl.wire.http import serving, url_of

AGENT = """
import json, mmap, os, sys, time, urllib.request


def post(url, token, value):
    request = urllib.request.Request(
        url, json.dumps(value).encode(), {"Authorization": f"Bearer {token}"}
    )
    return json.load(urllib.request.urlopen(request))


def say(endpoint, *messages):
    body = {"model": endpoint.model, "messages": list(messages)}
    reply = post(endpoint.base_url + "/chat/completions", endpoint.api_key, body)
    return reply["choices"][0]["message"]


def two_turns(task, endpoint):
    print("not a result")
    first = {"role": "user", "content": task["prompt"]}
    answer = say(endpoint, first)
    say(endpoint, first, answer, {"role": "user", "content": "more"})


def rewrites(task, endpoint):
    say(endpoint, {"role": "user", "content": task["prompt"]})
    say(endpoint, {"role": "user", "content": "short"})
    return {"style": 0.5, "tests": 1}


async def posts(task, endpoint):
    say(endpoint, {"role": "user", "content": task["prompt"]})
    post(endpoint.session_url + "/reward", endpoint.session_key, 0.25)
    post(endpoint.session_url + "/reward", endpoint.session_key, 0.5)


def insists(task, endpoint):
    while True:
        try:
            two_turns(task, endpoint)
        except Exception:
            time.sleep(0.05)


def silent(task, endpoint):
    return 1


def overlong(task, endpoint):
    try:
        say(endpoint, {"role": "user", "content": "a" * 40})
    except Exception:
        return 1


def fails(task, endpoint):
    raise ZeroDivisionError("mine")


def endless(task, endpoint):
    return {"a" * (17 << 20): 1.0}


def dies(task, endpoint):
    os.kill(os.getpid(), 9)


def hungry(task, endpoint):
    bytearray(5 << 30)


def reserves(task, endpoint):
    # As node does for WebAssembly: far more than the machine has, which nothing may write.
    mmap.mmap(-1, 64 << 30, mmap.MAP_PRIVATE, mmap.PROT_READ)


def hangs(task, endpoint):
    time.sleep(task.get("s", 60))
    return os.getpid()


def does(task, endpoint):
    return globals()[task["does"]](task, endpoint)


class Variables:
    base_url = os.environ.get("OPENAI_BASE_URL")
    api_key = os.environ.get("OPENAI_API_KEY")
    model = os.environ.get("OPENAI_MODEL")
    session_url = os.environ.get("ASYNC_RL_SESSION_URL")


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(os.environ["ASYNC_RL_TASK"]), Variables)
"""


class Drawing:
    """Never says the same twice, and is gone after `limit` answers."""

    def __init__(self, first: int, limit: int) -> None:
        self.said: list[tuple[list[int], int]] = []
        self._letters = iter(range(first, 27))
        self._limit = limit

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        if len(self.said) == self._limit:
            raise Unavailable("killed")
        letter = next(self._letters)
        self.said.append((list(prompt_token_ids), letter))
        yield completion(letter, 0, logprob=-letter, version=letter)


TESTS = [AssertTest(code="assert u")]


def made(
    path: Path,
    *overrides: str,
    size: int = 2,
    limit_s: float = 60,
    tests: Sequence[CodeTest] = TESTS,
    engine: Any = None,
    attempt: int = 1,
    **limits: int,
) -> tuple[Group, Judge]:
    """A group of the agents of agent.py."""
    (path / "agent.py").write_text(AGENT)
    config = compose("grpo_code", [f"generation.group_size={size}", *overrides])
    judge = Judge()
    ticket = msgspec.structs.replace(ticket_of(size, tests=tests), attempt=attempt)

    async def run() -> Group:
        sessions = Sessions()
        environments = open_environments(dataclasses.replace(config.agent, **limits))
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            async with serving(build_app(sessions), listener):
                agents = Agents(
                    config,
                    tokenizer=Alphabet(),
                    sessions=sessions,
                    environments=environments,
                    journal=Journal(path / "sessions", "1"),
                    url=url_of(listener),
                )
                async with opened_rollouts(config, judge, maker=agents.sample) as rollouts:
                    try:
                        async with asyncio.timeout(limit_s):
                            return await rollouts.group(
                                ticket, engine or Parrot(), written=lambda: None
                            )
                    finally:
                        await environments.close()
                        assert sessions.gauges["open"] == 0

    return asyncio.run(run()), judge


def failure(path: Path, *overrides: str, limit_s: float = 60, **more: Any) -> BaseException:
    with pytest.raises((ExceptionGroup, TimeoutError)) as caught:
        made(path, *overrides, limit_s=limit_s, **more)
    return root_cause(caught.value)


@pytest.mark.proves("rollout.fn")
def test_a_session_is_one_sample_scored_by_its_last_answer(tmp_path: Path) -> None:
    group, judge = made(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:two_turns]")
    assert len(group.trajectories) == 2
    for sample in group.trajectories:
        # The prompt a b, then u and the end, then "more", then v and the end.
        assert sample.token_ids.tolist() == [1, 2, 21, 0, 13, 15, 18, 5, 22, 0]
        assert sample.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 2
        assert sample.versions[sample.loss_mask].tolist() == [3, 3, 4, 4]
        assert sample.branches == ()
    assert judge.texts == ["v", "v"]


def test_a_command_is_told_its_task_and_endpoint_by_variables(tmp_path: Path) -> None:
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,two_turns]"
    group, judge = made(tmp_path, command)
    assert [len(sample.token_ids) for sample in group.trajectories] == [10, 10]
    assert judge.texts == ["v", "v"]


def test_a_command_gets_neither_the_key_that_rewards_nor_the_answer() -> None:
    task = {"prompt": "1 + 1", "prompt_id": "p", "row": {"answer": "two"}, "tests": ["two"]}
    endpoint = Endpoint.of("http://gateway", "sk-agent", "session-owner")
    found = variables(endpoint, task)
    assert found["ANTHROPIC_API_KEY"] == found["OPENAI_API_KEY"] == "sk-agent"
    assert json.loads(found["ASYNC_RL_TASK"]) == {"prompt": "1 + 1", "prompt_id": "p"}
    assert not any("owner" in value or "two" in value for value in found.values())


def test_a_rewritten_history_is_a_segment_and_its_reward_has_parts(tmp_path: Path) -> None:
    group, judge = made(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:rewrites]")
    sample = group.trajectories[0]
    assert sample.branches == ((4, -1),)
    assert sample.token_ids[4:].tolist() == [19, 8, 15, 18, 20, 22, 0]
    assert (sample.score.reward, sample.score.parts) == (1.5, {"style": 0.5, "tests": 1.0})
    assert judge.texts == []


def test_posted_rewards_add_up(tmp_path: Path) -> None:
    # The row has no tests, so the rewards are needed.
    group, _ = made(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:posts]", tests=[])
    assert [sample.score.reward for sample in group.trajectories] == [0.75, 0.75]
    assert returned_rewards(None) == returned_rewards({}) == []
    for wrong in (float("nan"), "good"):
        with pytest.raises(AgentError, match=f"the reward {wrong} is neither a finite number"):
            returned_rewards(wrong)


async def test_functions_run_in_as_many_processes_as_wanted_and_fail_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = compose("grpo_code", [f"rollout.fn=[{tmp_path}/agent.py:does]"]).agent
    environments = open_environments(dataclasses.replace(agent, workers=2))
    endpoint = Endpoint.of("http://gateway", "a", "b")
    runs = [environments.run(endpoint, {"does": "hangs", "s": 0.05}) for _ in range(4)]
    assert len(set(await asyncio.gather(*runs))) == 2
    for name, words in (
        ("fails", "ZeroDivisionError: mine"),
        ("endless", "more than 16 MB; return a number or a small dict"),
        ("dies", "worker exited with code -9"),
    ):
        with pytest.raises(AgentError, match=words):
            await environments.run(endpoint, {"does": name})
    await environments.close()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("silent", "without a call that is trained; it has to use OPENAI_BASE_URL"),
        ("overlong", "its last refused call: this call would start with 39 tokens"),
        ("fails", "exited with code 1: .*ZeroDivisionError: mine"),
        ("two_turns", "gave no reward, and its row has no tests"),
        # The limit is of the memory that it may write, not of what it reserves.
        ("hungry", "MemoryError"),
        ("reserves", "without a call that is trained"),
    ],
)
def test_an_environment_that_fails_gives_no_reward(tmp_path: Path, does: str, words: str) -> None:
    cause = failure(tmp_path, f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,{does}]", tests=[])
    assert isinstance(cause, AgentError)
    assert re.search(words, str(cause), re.DOTALL)


def test_the_journal_answers_only_what_was_asked_and_forgets(tmp_path: Path) -> None:
    def taken(
        journal: Journal, sample: int, before: list[int], limit: int, support: Support = EVERYTHING
    ) -> list[int] | None:
        how = Sampling(temperature=1.0, max_new_tokens=limit, support=support)
        done = journal.take(asked, sample, np.array(before, np.int32), how)
        return None if done is None else done.token_ids.tolist()

    asked = ticket_of(2)
    folder = tmp_path / "gateway-0"
    first = Journal(folder, "1")
    before = np.array([1, 2], np.int32)
    assert taken(first, 0, [1, 2], 9) is None
    first.add(asked, 0, before, asked.sampling, completion(5, 6))
    # Another gateway that gets the group reads the records, and removes them with its own.
    elsewhere = Journal(tmp_path / "gateway-1", "1")
    assert taken(elsewhere, 0, [1, 2], 9, Support(grammar="a")) is None
    assert taken(elsewhere, 0, [1, 2], 9) == [5, 6]
    assert taken(elsewhere, 0, [1, 2], 9) is None
    first.add(asked, 0, before, asked.sampling, completion(7, 8, is_truncated=True))
    assert taken(first, 0, [1, 2], 9) is None, "its own records are with their agents"
    # The kill came while a record was written.
    (file,) = folder.glob("records-of-life-1/*")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    second = Journal(folder, "1")
    assert taken(second, 1, [1, 2], 9) is None
    assert taken(second, 0, [1, 3], 9) is None
    assert taken(second, 0, [1, 2], 1) is None
    assert taken(second, 0, [1, 2], 2) == [5, 6]
    assert taken(second, 0, [1, 2], 1) is None
    assert taken(second, 0, [1, 2], 9) == [7, 8], "the session continues what its limit ended"
    assert taken(second, 0, [1, 2], 2) is None
    # What the newest attempt was served comes first.
    second.add(msgspec.structs.replace(asked, attempt=2), 0, before, asked.sampling, completion(9))
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) == [9]
    second.forget(asked.group_id)
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) is None
    second.add(asked, 0, before, asked.sampling, completion(5))
    elsewhere.forget(asked.group_id)
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) is None, "forgotten by the other gateway"
    second.add(asked, 0, before, asked.sampling, completion(5))
    (tmp_path / "notes" / "of a person").mkdir(parents=True)
    assert taken(Journal(folder, "2"), 0, [1, 2], 9) is None, "another supervisor's"
    assert (tmp_path / "notes" / "of a person").exists(), "only records are removed"
    assert [path.name for path in tmp_path.glob("gateway-*/*")] == ["records-of-life-2"]


def test_a_sample_is_counted_under_the_environment_of_its_row(tmp_path: Path) -> None:
    config = compose("grpo_code", [f"rollout.fn=[{tmp_path}/agent.py:posts]"])
    agents = Agents(
        config,
        tokenizer=Alphabet(),
        sessions=Sessions(),
        environments=open_environments(config.agent),
        journal=Journal(tmp_path / "gateway-0", "1"),
        url="",
    )
    name_of = agents.environment_of
    assert name_of({"environment": "pack/age:Guess-v0"}) == "pack_age:Guess-v0"
    for row in ({}, {"environment": {"taskset": {"id": "x"}}}):
        assert name_of(row) == "agent.py:posts"
    assert len({name_of({"environment": f"e{i}"}) for i in range(100)}) == 20
    assert name_of({"environment": "e3"}) == "e3"
    command = compose("grpo_code", ["rollout.fn=[python3.11,/x/play.py,a]"]).agent
    assert command.name == "play.py"


def test_an_environment_that_hangs_is_ended_with_its_time(tmp_path: Path) -> None:
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,hangs]"
    # Within the time limit of a test: its command would hang for a minute.
    assert isinstance(failure(tmp_path, command, limit_s=0.5), TimeoutError)


def test_a_call_that_hangs_ends_no_other_call_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.rollouts.environments.GRACE_S", 0.05)
    (tmp_path / "agent.py").write_text(AGENT)
    config = compose("grpo_code", [f"rollout.fn=[{tmp_path}/agent.py:hangs]"])
    endpoint = Endpoint.of("http://gateway", "a", "b")

    async def main() -> None:
        workers = Workers(dataclasses.replace(config.agent, workers=1))
        hanging = asyncio.create_task(workers.run(endpoint, {"s": 60}))
        others = [asyncio.create_task(workers.run(endpoint, {"s": s})) for s in (0.6, 0.8)]
        pid = await workers.run(endpoint, {"s": 0})
        (first,) = workers._workers
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        await asyncio.sleep(0.1)
        later = await workers.run(endpoint, {"s": 0})
        assert await asyncio.gather(*others) == [pid, pid]
        assert later != pid
        # Nothing but the call that hangs is left in it.
        await asyncio.wait([first._reading])
        assert await workers.run(endpoint, {"s": 0}) == later
        gone = weakref.ref(first)
        del first, hanging
        gc.collect()
        assert gone() is None, "ended processes stay in memory"
        await workers.close()

    asyncio.run(main())


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    def refusals(*overrides: str) -> str:
        return "\n".join(problems(compose_unchecked("grpo_code", overrides)))

    agent = "rollout.fn=[a:b]"
    assert refusals(agent) == ""
    assert "placement=colocated" in refusals(agent, "placement=colocated")
    pool = "generators.pools.x={count: 1, work: both}"
    assert "sessions use all generators alike" in refusals(agent, pool)
    missing = compose_unchecked("grpo_code", ["rollout.fn=[no-such-program]"])
    with pytest.raises(ConfigError, match="the program no-such-program was not found"):
        preflight(missing, this_machine())


class Generators:
    """The context of a gateway with two generators; those that are gone raise Unavailable."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.activity = Activity()
        self.name = "gateway-0"
        self.config = compose("grpo_code", [])
        self.calls: list[tuple[str, Any]] = []
        self.gone: set[str] = set()
        self.failure: Exception | None = None
        self.is_called = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        members = [
            Member(
                name=f"generator-{i}", role="generator", pid=1, state="serving", since_s=0.0,
                address="x",
            )
            for i in range(2)
        ]  # fmt: skip
        self.directory.update(Members(revision=1, members=members))

    def incarnation_of(self, member: Member) -> Any:
        async def call(request: Any, *, timeout_s: float) -> Any:
            if isinstance(request, WatchVersion):
                if request.known.version == NO_VERSION:
                    return EngineVersion(version=3 + int(member.name[-1]), life=1)
                return await asyncio.Event().wait()
            self.calls.append((member.name, request))
            self.is_called.set()
            if member.name in self.gone:
                raise self.failure or Unavailable(f"{member.name} ended")
            if isinstance(request, ReadCalls):
                return CallsRead(content=request.text, calls=[])
            await self.may_answer.wait()
            return Continuation(completed=completion(9))

        return SimpleNamespace(call=call)

    @contextlib.asynccontextmanager
    async def engines(self) -> AsyncIterator[RemoteEngines]:
        """The engines of both, once their versions are known."""
        engines = RemoteEngines(cast(Any, self))
        known = asyncio.Semaphore(0)
        following = asyncio.create_task(engines.follow(known.release))
        for _ in range(2):
            await known.acquire()
        yield engines
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_a_session_stays_with_its_generator_and_moves_with_the_same_tokens() -> None:
    async def main() -> None:
        generators = Generators()
        async with generators.engines() as engines:
            assert engines.version == 3

            async def ask(session: str, ids: list[int]) -> None:
                row = np.array(ids, np.int32)
                await one_completion(engines, f"{session}/0.0", row, ticket_of(1).sampling)

            for length in (1, 2, 3):
                await ask("1.1.0", [5] * length)
            (first,) = {name for name, _ in generators.calls}
            generators.gone = {first}
            await ask("1.1.0", [5] * 4)
            moved = generators.calls[-2:]
            assert [request.token_ids.tolist() for _, request in moved] == [[5] * 4, [5] * 4]
            # The group first: the engine of transformers draws by it.
            assert {request.request_id for _, request in moved} == {"1.1.0/0.0.gateway-0"}
            assert len({name for name, _ in moved}) == 2
            # The generator that is gone is asked no more.
            generators.calls.clear()
            await ask("2.1.0", [6])
            assert first not in {name for name, _ in generators.calls}
            # An attempt that is closed leaves nothing behind: a run has millions of sessions.
            engines.forget(ticket_of(1))
            assert list(engines.chosen) == ["2.1.0"]

    asyncio.run(main())


def test_a_call_under_which_engines_end_is_not_sent_again() -> None:
    async def main() -> None:
        row = np.array([5], np.int32)
        generators = Generators()
        async with generators.engines() as engines:
            generators.failure = EngineDead("out of memory")
            generators.gone = {"generator-0", "generator-1"}
            with pytest.raises(EngineDead, match="out of memory"):
                await one_completion(engines, "1.1.0/0.0", row, ticket_of(1).sampling)
            assert len(generators.calls) == 1
            # A crash names no cause, so that the call has a second try.
            generators.failure = Unavailable("reset")
            with pytest.raises(EngineDead, match="two generators were lost under one call"):
                await one_completion(engines, "1.1.0/0.1", row, ticket_of(1).sampling)
            assert len(generators.calls) == 3

    asyncio.run(main())


def test_an_attempt_whose_call_ended_the_engine_fails_with_the_cause(tmp_path: Path) -> None:
    engine = Drawing(3, limit=2)
    # The agent would ask again for as long as it gets no answer.
    cause = failure(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:insists]", engine=engine, size=2)
    assert isinstance(cause, AgentError)
    assert "a call ended its engine: killed" in str(cause)


def test_one_generator_reads_all_tool_calls_as_long_as_it_lives() -> None:
    async def main() -> None:
        generators = Generators()
        generators.may_answer.clear()
        request = ReadCalls(parser="x", text="y", token_ids=np.zeros(0, np.int32), tools=b"[]")
        async with generators.engines() as engines:

            async def read() -> str:
                assert (await engines.read_calls(request)).content == "y"
                return generators.calls[-1][0]

            first = await read()
            # Also while the other generator has less to do.
            generators.is_called.clear()
            row = np.array([5], np.int32)
            writing = asyncio.create_task(
                one_completion(engines, "1.1.0/0.0", row, ticket_of(1).sampling)
            )
            await generators.is_called.wait()
            assert generators.calls[1][0] == first
            assert await read() == first
            generators.gone = {first}
            assert await read() != first
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    asyncio.run(main())
