"""Groups that agents make: real environments in processes of their own, over the real endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from composing import compose, compose_unchecked

from async_rl.config.checks.run import problems
from async_rl.core.errors import AgentError, ConfigError, Unavailable, root_cause
from async_rl.core.machine import this_machine
from async_rl.core.types import (
    AssertTest,
    CodeProblem,
    CodeTest,
    Group,
    Prompt,
    Purpose,
    Sampling,
    Score,
    Ticket,
)
from async_rl.launchers.preflight.checks import preflight
from async_rl.observability.activity import Activity
from async_rl.protocol.generator import Completion, Continuation
from async_rl.protocol.membership import Member
from async_rl.rollouts.agents import Agents, score_of
from async_rl.rollouts.environments import open_environments
from async_rl.rollouts.journal import Journal
from async_rl.rollouts.remote import RemoteEngines
from async_rl.rollouts.rollout import Rollouts
from async_rl.runtime.directory import Directory
from async_rl.sessions.open_sessions import Sessions
from async_rl.sessions.server import build_app
from async_rl.wire.http import serving, url_of

AGENT = """
import json, os, sys, time, urllib.request


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
    post(endpoint.session_url + "/reward", endpoint.api_key, 0.25)
    post(endpoint.session_url + "/reward", endpoint.api_key, 0.5)


def pid(task, endpoint):
    say(endpoint, {"role": "user", "content": task["prompt"]})
    return os.getpid()


def silent(task, endpoint):
    return 1


def fails(task, endpoint):
    raise ZeroDivisionError("mine")


def text(task, endpoint):
    say(endpoint, {"role": "user", "content": task["prompt"]})
    return "good"


def endless(task, endpoint):
    return {"a" * (17 << 20): 1.0}


def dies(task, endpoint):
    os.kill(os.getpid(), 9)


def hungry(task, endpoint):
    bytearray(900 << 20)


def hangs(task, endpoint):
    time.sleep(60)


class Variables:
    base_url = os.environ.get("OPENAI_BASE_URL")
    api_key = os.environ.get("OPENAI_API_KEY")
    model = os.environ.get("OPENAI_MODEL")
    session_url = os.environ.get("ASYNC_RL_SESSION_URL")


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(os.environ["ASYNC_RL_TASK"]), Variables)
"""


class Alphabet:
    """Token k is the k-th letter; 0 ends and is no text."""

    chat_template = None
    eos_token = ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + int(i)) for i in ids if i)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 96 for letter in text if letter.isalpha()]}


class Parrot:
    """Says u and v in turn."""

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        turn = int(request_id.rpartition("/")[2].partition(".")[0])
        yield Completion(
            index=0,
            token_ids=np.array([21 + turn, 0], np.int32),
            logprobs=np.full(2, -0.5 - turn, np.float32),
            versions=np.full(2, 3 + turn, np.int32),
            is_truncated=False,
        )


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
        yield Completion(
            index=0,
            token_ids=np.array([letter, 0], np.int32),
            logprobs=np.full(2, -letter, np.float32),
            versions=np.full(2, letter, np.int32),
            is_truncated=False,
        )


class Judge:
    def __init__(self) -> None:
        self.judged: list[str] = []

    async def score(self, prompt: Prompt, text: str, sample: Any) -> Score:
        self.judged.append(text)
        return Score(reward=1.0, parts={}, verdicts=(), latency_s=0.0)

    async def close(self) -> None:
        pass


TESTS = [AssertTest(code="assert u")]


def ticket(num_samples: int, tests: list[CodeTest]) -> Ticket:
    ids = np.array([1, 2], np.int32)
    problem = CodeProblem(tests=tests, row="{}")
    return Ticket(
        group_id=1,
        attempt=1,
        purpose=Purpose.TRAIN,
        num_samples=num_samples,
        admitted_version=3,
        prompt=Prompt(prompt_id="p", text="ab", token_ids=ids, data_source="code", problem=problem),
        sampling=Sampling(temperature=1.0, max_new_tokens=30),
    )


def groups(
    path: Path,
    *overrides: str,
    count: int = 1,
    size: int = 2,
    limit_s: float = 60,
    tests: Sequence[CodeTest] = TESTS,
    engine: Any = None,
    attempt: int = 1,
    **limits: int,
) -> tuple[list[Group], Judge]:
    """Groups of the same agents, one after another."""
    (path / "agent.py").write_text(AGENT)
    config = compose("grpo_code", [f"generation.group_size={size}", *overrides])
    judge = Judge()

    async def run() -> list[Group]:
        sessions = Sessions()
        environments = open_environments(dataclasses.replace(config.agent, **limits))
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            url = url_of(listener)
            async with serving(build_app(sessions), listener):
                agents = Agents(
                    config,
                    tokenizer=Alphabet(),
                    sessions=sessions,
                    environments=environments,
                    journal=Journal(path / "sessions", "1"),
                    url=url,
                )
                rollouts = Rollouts(
                    config,
                    tokenizer=Alphabet(),
                    token="t",
                    name="gateway-0",
                    activity=Activity(),
                    maker=agents.sample,
                )
                rollouts._scorer = cast(Any, judge)
                made = []
                try:
                    for _ in range(count):
                        async with asyncio.timeout(limit_s):
                            asked = msgspec.structs.replace(
                                ticket(size, list(tests)), attempt=attempt
                            )
                            group = rollouts.group(asked, engine or Parrot(), written=lambda: None)
                            made.append(await group)
                finally:
                    await environments.close()
                    await rollouts.close()
                    assert not len(sessions)
        return made

    return asyncio.run(run()), judge


def failure(path: Path, *overrides: str, limit_s: float = 60, **more: Any) -> BaseException:
    with pytest.raises((ExceptionGroup, TimeoutError)) as caught:
        groups(path, *overrides, limit_s=limit_s, **more)
    return root_cause(caught.value)


@pytest.mark.proves("rollout.fn")
def test_a_session_is_one_sample_scored_by_its_last_answer(tmp_path: Path) -> None:
    (group,), judge = groups(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:two_turns]")
    assert len(group.trajectories) == 2
    for sample in group.trajectories:
        # The prompt a b, then u and the end, then "more", then v and the end.
        assert sample.token_ids.tolist() == [1, 2, 21, 0, 13, 15, 18, 5, 22, 0]
        assert sample.loss_mask.tolist() == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 2
        assert sample.versions[sample.loss_mask].tolist() == [3, 3, 4, 4]
        assert sample.starts == ()
    assert judge.judged == ["v", "v"]


def test_a_command_is_told_its_task_and_endpoint_by_variables(tmp_path: Path) -> None:
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,two_turns]"
    (group,), judge = groups(tmp_path, command)
    assert [len(sample.token_ids) for sample in group.trajectories] == [10, 10]
    assert judge.judged == ["v", "v"]


def test_a_rewritten_history_is_a_segment_and_its_reward_has_parts(tmp_path: Path) -> None:
    (group,), judge = groups(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:rewrites]")
    sample = group.trajectories[0]
    assert sample.starts == (4,)
    assert sample.token_ids[4:].tolist() == [19, 8, 15, 18, 20, 22, 0]
    assert (sample.score.reward, sample.score.parts) == (1.5, {"style": 0.5, "tests": 1.0})
    assert judge.judged == []


def test_posted_rewards_add_up(tmp_path: Path) -> None:
    (group,), _ = groups(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:posts]")
    assert [sample.score.reward for sample in group.trajectories] == [0.75, 0.75]
    assert score_of(None, []) is None
    assert score_of({}, []) is None
    with pytest.raises(AgentError, match="neither a finite number"):
        score_of(float("nan"), [])


def test_functions_run_in_as_many_processes_as_wanted(tmp_path: Path) -> None:
    for workers in (1, 3):
        made, _ = groups(
            tmp_path,
            f"rollout.fn=[{tmp_path}/agent.py:pid]",
            workers=workers,
            size=6,
        )
        pids = Counter(sample.score.reward for sample in made[0].trajectories)
        assert len(pids) == workers


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("silent", "without a call of the policy"),
        ("fails", "ZeroDivisionError: mine"),
        ("text", "is not a reward"),
        ("dies", "worker exited with code -9"),
        ("endless", "which is not a reward; return a number, a small dict"),
    ],
)
def test_an_environment_that_fails_gives_no_reward(tmp_path: Path, name: str, words: str) -> None:
    cause = failure(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:{name}]")
    assert isinstance(cause, AgentError)
    assert words in str(cause)


def test_a_group_goes_on_with_what_a_killed_gateway_served(tmp_path: Path) -> None:
    agent = f"rollout.fn=[{tmp_path}/agent.py:two_turns]"
    killed = Drawing(3, limit=3)
    failure(tmp_path, agent, engine=killed)
    assert len(killed.said) == 3
    (file,) = (tmp_path / "sessions" / "records-of-life-1").iterdir()
    # The kill came while a record was written.
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    successor = Drawing(13, limit=99)
    (group,), _ = groups(tmp_path, agent, engine=successor, attempt=2)
    # Only the fourth answer was missing.
    assert len(successor.said) == 1
    trained = [
        (int(token), float(logprob), int(version))
        for sample in group.trajectories
        for token, logprob, version in zip(
            sample.token_ids[sample.loss_mask],
            sample.behavior_logprobs[sample.loss_mask],
            sample.versions[sample.loss_mask],
            strict=True,
        )
        if token
    ]
    letters = [letter for _, letter in killed.said + successor.said]
    assert sorted(trained) == [(letter, -float(letter), letter) for letter in sorted(letters)]
    # The context of the last answer has what the killed gateway served.
    assert set(successor.said[0][0]) & {letter for _, letter in killed.said}
    # Both lives are read by a third one.
    (again,), _ = groups(tmp_path, agent, engine=Drawing(26, limit=0), attempt=3)
    assert [s.token_ids.tolist() for s in again.trajectories] == [
        s.token_ids.tolist() for s in group.trajectories
    ]


def test_the_journal_answers_only_what_was_asked_and_forgets(tmp_path: Path) -> None:
    def completed(*ids: int, is_truncated: bool = False) -> Completion:
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            is_truncated=is_truncated,
        )

    def taken(journal: Journal, sample: int, before: list[int], limit: int) -> list[int] | None:
        done = journal.take(asked, sample, np.array(before, np.int32), limit)
        return None if done is None else done.token_ids.tolist()

    asked = ticket(2, [])
    folder = tmp_path / "gateway-0"
    first = Journal(folder, "1")
    before = np.array([1, 2], np.int32)
    assert taken(first, 0, [1, 2], 9) is None
    first.add(asked, 0, before, completed(5, 6))
    # Another gateway that gets the group reads the records, and removes them with its own.
    elsewhere = Journal(tmp_path / "gateway-1", "1")
    assert taken(elsewhere, 0, [1, 2], 9) == [5, 6]
    assert taken(elsewhere, 0, [1, 2], 9) is None
    first.add(asked, 0, before, completed(7, 8, is_truncated=True))
    assert taken(first, 0, [1, 2], 9) is None, "its own records are with their agents"
    second = Journal(folder, "1")
    assert taken(second, 1, [1, 2], 9) is None
    assert taken(second, 0, [1, 3], 9) is None
    assert taken(second, 0, [1, 2], 1) is None
    assert taken(second, 0, [1, 2], 2) == [5, 6]
    assert taken(second, 0, [1, 2], 9) is None, "the other one was ended by a limit of 2"
    assert taken(second, 0, [1, 2], 2) == [7, 8]
    assert taken(second, 0, [1, 2], 2) is None
    # What the newest attempt was served comes first.
    second.add(msgspec.structs.replace(asked, attempt=2), 0, before, completed(9))
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) == [9]
    second.forget(asked.group_id)
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) is None
    second.add(asked, 0, before, completed(5))
    elsewhere.forget(asked.group_id)
    assert taken(Journal(folder, "1"), 0, [1, 2], 9) is None, "forgotten by the other gateway"
    second.add(asked, 0, before, completed(5))
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
    assert agents._environment_of({"environment": "pack/age:Guess-v0"}) == "pack_age:Guess-v0"
    for row in ({}, {"environment": {"taskset": {"id": "x"}}}):
        assert agents._environment_of(row) == "agent.py:posts"
    names = {agents._environment_of({"environment": f"e{i}"}) for i in range(100)}
    assert len(names) == 20
    assert agents._environment_of({"environment": "e3"}) == "e3"
    command = compose("grpo_code", ["rollout.fn=[python3.11,/x/play.py,a]"]).agent
    assert command.name == "play.py"


def test_without_tests_the_environment_has_to_give_the_reward(tmp_path: Path) -> None:
    (group,), _ = groups(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:rewrites]", tests=[])
    assert group.trajectories[0].score.reward == 1.5
    cause = failure(tmp_path, f"rollout.fn=[{tmp_path}/agent.py:two_turns]", tests=[])
    assert isinstance(cause, AgentError)
    assert "gave no reward, and its row has no tests" in str(cause)


def test_a_command_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    cause = failure(tmp_path, f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,fails]")
    assert isinstance(cause, AgentError)
    assert "exited with code 1" in str(cause)
    assert "ZeroDivisionError: mine" in str(cause)


def test_an_environment_has_a_memory_limit(tmp_path: Path) -> None:
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,hungry]"
    cause = failure(tmp_path, command, memory_mb=500)
    assert "MemoryError" in str(cause)
    cause = failure(tmp_path, command, memory_mb=4096)
    assert "without a call of the policy" in str(cause)


def test_an_environment_that_hangs_is_ended_with_its_time(tmp_path: Path) -> None:
    started_s = time.monotonic()
    command = f"rollout.fn=[{sys.executable},{tmp_path}/agent.py,hangs]"
    assert isinstance(failure(tmp_path, command, limit_s=3), TimeoutError)
    assert time.monotonic() - started_s < 20


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
    """A directory of generators, of which those that are gone raise Unavailable."""

    def __init__(self) -> None:
        self.directory = Directory()
        self.activity = Activity()
        self.name = "gateway-0"
        self.config = compose("grpo_code", [])
        self.calls: list[tuple[str, list[int]]] = []
        self.gone: set[str] = set()
        members = {name: self.member(name) for name in ("generator-0", "generator-1")}
        self.directory._members = members

    def member(self, name: str) -> Member:
        return Member(name=name, role="generator", pid=1, state="serving", since_s=0.0, address="x")

    def incarnation_of(self, member: Member) -> Any:
        async def call(request: Any, *, timeout_s: float) -> Continuation:
            self.calls.append((member.name, request.token_ids.tolist()))
            if member.name in self.gone:
                raise Unavailable(f"{member.name} ended")
            done = Completion(
                token_ids=np.array([9], np.int32),
                logprobs=np.zeros(1, np.float32),
                versions=np.zeros(1, np.int32),
                is_truncated=False,
            )
            return Continuation(completed=done)

        return SimpleNamespace(call=call)


def test_a_session_stays_with_its_generator_and_moves_with_the_same_tokens() -> None:
    async def main() -> None:
        generators = Generators()
        engines = RemoteEngines(cast(Any, generators))
        engines._versions = {("generator-0", 1): 3, ("generator-1", 1): 4}
        assert engines.version == 3
        sampling = Sampling(temperature=1.0, max_new_tokens=4)

        async def ask(session: str, ids: list[int]) -> None:
            completions = engines.generate(f"{session}/0.0", ids, 1, sampling)
            async with contextlib.aclosing(completions):
                await anext(completions)

        for length in (1, 2, 3):
            await ask("1.1.0", [5] * length)
        (first,) = {name for name, _ in generators.calls}
        generators.gone = {first}
        await ask("1.1.0", [5] * 4)
        moved = generators.calls[-2:]
        assert [ids for _, ids in moved] == [[5] * 4, [5] * 4]
        assert len({name for name, _ in moved}) == 2
        # The one that is gone is asked no more.
        generators.calls.clear()
        await ask("2.1.0", [6])
        assert first not in {name for name, _ in generators.calls}
        # An attempt that is closed leaves nothing behind: a run has millions of sessions.
        engines.forget(ticket(1, []))
        assert list(engines._chosen) == ["2.1.0"]

    asyncio.run(main())
