"""Groups that agents make: real environments in processes of their own, over the real endpoint."""

import asyncio
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from composing import compose, compose_unchecked
from rollouts_support import (
    Alphabet,
    Judge,
    Parrot,
    completion,
    opened_rollouts,
    process,
    ticket_of,
)  # fmt: skip

from async_rl.config.checks.run import problems
from async_rl.core.calls import EVERYTHING, Support
from async_rl.core.errors import AgentError, ConfigError, EngineDead, Unavailable, root_cause
from async_rl.core.machine import this_machine
from async_rl.core.types import NO_VERSION, AssertTest, CodeTest, Group, Sampling
from async_rl.generation.engine import one_completion
from async_rl.launchers.preflight.checks import preflight
from async_rl.protocol.generator import Completion, EngineVersion, WatchVersion
from async_rl.protocol.supervisor import Member, Members
from async_rl.rollouts.agents import Agents, returned_rewards
from async_rl.rollouts.environments import Workers, open_environments, variables
from async_rl.rollouts.journal import Journal
from async_rl.rollouts.remote import RemoteEngines
from async_rl.runtime.directory import Directory
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app
from async_rl.wire.addresses import LOOPBACK
from async_rl.wire.http import listen, serving, url_of

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


async def rewrites(task, endpoint):
    say(endpoint, {"role": "user", "content": task["prompt"]})
    say(endpoint, {"role": "user", "content": "short"})
    post(endpoint.session_url + "/reward", endpoint.session_key, {"tests": 0.25})
    return {"style": 0.5, "tests": 1}


def insists(task, endpoint):
    while True:
        try:
            two_turns(task, endpoint)
        except Exception:
            time.sleep(0.05)


def overlong(task, endpoint):
    try:
        say(endpoint, {"role": "user", "content": "a" * 40})
    except Exception:
        return 1


def fails(task, endpoint):
    raise ZeroDivisionError("mine")


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
        self._letters = iter(range(first, min(first + limit, 27)))

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        letter = next(self._letters, None)
        if letter is None:
            raise Unavailable("killed")
        yield completion(letter, 0, logprob=-letter, version=letter)


TESTS = [AssertTest(code="assert u")]


async def made(
    path: Path,
    *overrides: str,
    limit_s: float = 60,
    tests: Sequence[CodeTest] = TESTS,
    engine: Any = None,
) -> tuple[Group, Judge]:
    """A group of two agents of agent.py."""
    (path / "agent.py").write_text(AGENT)
    config = compose("grpo_code", ["generation.group_size=2", *overrides])
    judge, sessions = Judge(), Sessions()
    environments = open_environments(config.agent)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(LOOPBACK, 0))
        await stack.enter_async_context(serving(build_app(sessions), listener))
        agents = Agents(
            config,
            tokenizer=Alphabet(),
            sessions=sessions,
            environments=environments,
            journal=Journal(path / "sessions", "1"),
            url=url_of(listener),
        )
        opened = opened_rollouts(config, judge, maker=agents.sample)
        rollouts = await stack.enter_async_context(opened)
        try:
            async with asyncio.timeout(limit_s):
                ticket, using = ticket_of(2, tests=tests), engine or Parrot()
                return await rollouts.group(ticket, using, written=lambda: None), judge
        finally:
            await environments.close()
            assert sessions.gauges["open"] == 0


async def failure(path: Path, *overrides: str, **more: Any) -> BaseException:
    with pytest.raises((ExceptionGroup, TimeoutError)) as caught:
        await made(path, *overrides, **more)
    return root_cause(caught.value)


@pytest.mark.proves("rollout.fn")
async def test_a_session_is_one_sample_scored_by_its_last_answer(tmp_path: Path) -> None:
    group, judge = await made(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:two_turns]")
    assert len(group.trajectories) == 2
    for sample in group.trajectories:
        # The prompt a b, then u and the end, then "more", then v and the end.
        assert sample.token_ids.tolist() == [1, 2, 21, 0, 13, 15, 18, 5, 22, 0]
        assert sample.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 2
        assert sample.versions[sample.loss_mask].tolist() == [3, 3, 4, 4]
        assert sample.branches == ()
    assert judge.texts == ["v", "v"]


def test_a_command_gets_neither_the_key_that_rewards_nor_the_answer() -> None:
    task = {"prompt": "1 + 1", "prompt_id": "p", "row": {"answer": "two"}, "tests": ["two"]}
    endpoint = Endpoint.of("http://gateway", "sk-agent", "session-owner")
    found = variables(endpoint, task)
    assert found["ANTHROPIC_API_KEY"] == found["OPENAI_API_KEY"] == "sk-agent"
    assert json.loads(found["ASYNC_RL_TASK"]) == {"prompt": "1 + 1", "prompt_id": "p"}
    assert not any("owner" in value or "two" in value for value in found.values())


async def test_a_rewritten_history_is_a_segment_and_parts_of_rewards_add_up(tmp_path: Path) -> None:
    # The row has no tests, so the rewards are needed.
    group, judge = await made(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:rewrites]", tests=[])
    sample = group.trajectories[0]
    assert sample.branches == ((4, -1),)
    assert sample.token_ids[4:].tolist() == [19, 8, 15, 18, 20, 22, 0]
    assert (sample.score.reward, sample.score.parts) == (1.75, {"style": 0.5, "tests": 1.25})
    assert judge.texts == []
    assert returned_rewards(None) == returned_rewards({}) == []
    with pytest.raises(AgentError, match="the reward nan is neither a finite number"):
        returned_rewards(float("nan"))


async def test_functions_run_in_as_many_processes_as_wanted_and_fail_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    agent = compose("grpo_code", [f"rollout.fn=[{tmp_path}/agent.py:does]"]).agent
    environments = open_environments(dataclasses.replace(agent, workers=2))
    endpoint = Endpoint.of("http://gateway", "a", "b")
    runs = [environments.run(endpoint, {"does": "hangs", "s": 0.05}) for _ in range(4)]
    assert len(set(await asyncio.gather(*runs))) == 2
    for name, words in (
        ("fails", "ZeroDivisionError: mine"),
        ("dies", "worker exited with code -9"),
    ):
        with pytest.raises(AgentError, match=words):
            await environments.run(endpoint, {"does": name})
    await environments.close()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("overlong", "its last refused call: this call would start with 39 tokens"),
        ("two_turns", "gave no reward, and its row has no tests"),
        # The limit is of the memory that it may write, not of what it reserves.
        ("hungry", "exited with code 1: .*MemoryError"),
        ("reserves", "without a call that is trained; it has to use OPENAI_BASE_URL"),
    ],
)
async def test_an_environment_that_fails_gives_no_reward(
    tmp_path: Path, does: str, words: str
) -> None:
    cause = await failure(
        tmp_path, f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,{does}]", tests=[]
    )
    assert isinstance(cause, AgentError)
    assert re.search(words, str(cause), re.DOTALL)


def test_the_journal_skips_a_cut_record_and_removes_only_records(tmp_path: Path) -> None:
    def taken(limit: int, grammar: str = "", life: str = "1") -> list[int] | None:
        support = Support(grammar=grammar) if grammar else EVERYTHING
        how = Sampling(temperature=1.0, max_new_tokens=limit, support=support)
        done = Journal(tmp_path / "gateway-0", life).take(asked, 0, before, how)
        return None if done is None else done.token_ids.tolist()

    asked, before = ticket_of(2), np.array([1, 2], np.int32)
    Journal(tmp_path / "gateway-0", "1").add(asked, 0, before, asked.sampling, completion(5, 6))
    # The kill came while a record was written.
    (file,) = tmp_path.glob("gateway-0/records-of-life-1/*")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    assert (taken(9), taken(2), taken(1), taken(9, "a")) == ([5, 6], [5, 6], None, None)
    (tmp_path / "notes" / "of a person").mkdir(parents=True)
    assert taken(9, life="2") is None, "another supervisor's"
    assert (tmp_path / "notes" / "of a person").exists()
    assert [path.name for path in tmp_path.glob("gateway-*/*")] == ["records-of-life-2"]


async def test_an_environment_that_hangs_is_ended_with_its_time(tmp_path: Path) -> None:
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,hangs]"
    # Within the time limit of a test: its command would hang for a minute.
    assert isinstance(await failure(tmp_path, command, limit_s=0.5), TimeoutError)


async def test_a_call_that_hangs_ends_no_other_call_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.rollouts.agent_worker.GRACE_S", 0.0)
    (tmp_path / "agent.py").write_text(AGENT)
    config = compose("grpo_code", [f"rollout.fn=[{tmp_path}/agent.py:hangs]"])
    endpoint = Endpoint.of("http://gateway", "a", "b")
    workers = Workers(dataclasses.replace(config.agent, workers=1))
    hanging = asyncio.create_task(workers.run(endpoint, {"s": 60}))
    other = asyncio.create_task(workers.run(endpoint, {"s": 0.2}))
    pid = await workers.run(endpoint, {"s": 0})
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert await other == pid
    assert await workers.run(endpoint, {"s": 0}) != pid
    await workers.close()


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


async def test_a_call_under_which_engines_end_is_not_sent_again() -> None:
    """The calls of two generators fail."""
    # A crash names no cause, so that the call has a second try.
    failures = [EngineDead("out of memory"), *[Unavailable("reset")] * 2]

    def incarnation_of(member: Member) -> Any:
        async def call(request: Any, *, timeout_s: float) -> Any:
            if not isinstance(request, WatchVersion):
                raise failures.pop(0)
            if request.known.version == NO_VERSION:
                return EngineVersion(version=3, life=1)
            return await asyncio.Event().wait()

        return SimpleNamespace(call=call)

    usual: Any = {"role": "generator", "pid": 1, "state": "serving", "since_s": 0.0}
    members = [Member(name=f"generator-{i}", address="x", **usual) for i in range(2)]
    directory = Directory()
    directory.update(Members(revision=1, members=members))
    more = {"directory": directory, "incarnation_of": incarnation_of}
    engines = RemoteEngines(process(compose("grpo_code"), None, **more))  # type: ignore[arg-type]
    known = asyncio.Semaphore(0)
    following = asyncio.create_task(engines.follow(known.release))
    for _ in members:
        await known.acquire()
    row = np.array([5], np.int32)
    for message in ("out of memory", "two generators were lost under one call"):
        with pytest.raises(EngineDead, match=message):
            await one_completion(engines, "1.1.0/0.0", row, ticket_of(1).sampling)
    assert failures == []
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_an_attempt_whose_call_ended_the_engine_fails_with_the_cause(tmp_path: Path) -> None:
    engine = Drawing(3, limit=2)
    # The agent would ask again for as long as it gets no answer.
    cause = await failure(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:insists]", engine=engine)
    assert isinstance(cause, AgentError)
    assert "a call ended its engine: killed" in str(cause)
