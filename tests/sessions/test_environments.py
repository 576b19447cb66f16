"""Environments of the real packages verifiers and gymnasium, played over the endpoint."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from composing import compose
from sessions_support import CHATML, Row, endpoint, open_session

from async_rl.rollouts.agents import credited
from async_rl.sessions.endpoint import Endpoint
from async_rl.sessions.session import Session

SUMS = '''
import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Sums", "Chat"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def is_right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def is_short(self, trace) -> float:
        return float(len(trace.last_reply) < 10)


class Sums(vf.Taskset[Sum]):
    def load(self):
        for a in range(9):
            yield Sum(Data(prompt=f"{a} + 1", answer=str(a + 1)), self.config.task)


class Chat(vf.Harness[vf.HarnessConfig]):
    """Without the download of a program that the packaged harnesses begin with."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    SUPPORTS_RESUME = True

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        messages = [{"role": "user", "content": data.prompt}]
        if not isinstance(data.prompt, str):
            messages = [m.model_dump(include={"role", "content"}) for m in data.prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
'''
ENV = {"taskset": {"id": "sums_env"}, "agent": {"runtime": {"type": "subprocess"}}}
GUESS = '''
import gymnasium
from gymnasium.spaces import Text


class Guess(gymnasium.Env):
    """The number is between 0 and 9."""

    observation_space = Text(100)
    action_space = Text(100)

    def __init__(self, limit=3):
        self.left = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        return "guess", {}

    def step(self, action):
        self.left -= 1
        if action.strip() == str(self.number):
            return "right", 1.0, True, False, {}
        return "no , again", -0.25, False, self.left == 0, {}


gymnasium.register("Guess-v0", Guess)
'''


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_env.py").write_text(SUMS)
    (tmp_path / "guess_env.py").write_text(GUESS)
    monkeypatch.syspath_prepend(tmp_path)


async def play(adapter: Any, row: dict[str, Any], session: Session) -> Any:
    async with endpoint(session) as url:
        reached = Endpoint.of(url, session.token, session.session_key)
        return await adapter.play({"row": row}, reached)


def rewards(adapter: Any, row: dict[str, Any], session: Session) -> dict[Any, Any]:
    """The rewards that a played row posts, by role."""
    assert asyncio.run(play(adapter, row, session)) == 0
    return {reward.role: reward.parts for reward in session.rewards}


def rows(adapter: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> list[Any]:
    monkeypatch.setattr(sys, "argv", ["adapter", *words])
    adapter.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def verifiers() -> Any:
    pytest.importorskip("verifiers.v1", reason="make adapters VERIFIERS=0.4.0 installs it")
    return importlib.import_module("async_rl.adapters.verifiers_tasks")


def gymnasium() -> Any:
    pytest.importorskip("gymnasium", reason="make adapters installs it")
    return importlib.import_module("async_rl.adapters.gymnasium_text")


def test_a_verifiers_environment_is_played_and_scored_by_its_rewards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = verifiers()
    written = rows(adapter, monkeypatch, capsys, json.dumps(ENV), "3")
    assert [row["prompt"] for row in written] == ["0 + 1", "1 + 1", "2 + 1"]
    session, policy = open_session(CHATML, ["3"])
    assert rewards(adapter, written[2], session) == {"agent": {"is_right": 2.0, "is_short": 0.5}}
    row = Row(session)
    # What is trained is what the policy wrote, a 3 and the end token.
    assert (
        row.tokens.token_ids[row.tokens.is_written].tolist()
        == policy.served[0][1].token_ids.tolist()
    )
    session, _ = open_session(CHATML, ["7"])
    assert rewards(adapter, written[2], session) == {"agent": {"is_right": 0.0, "is_short": 0.5}}


def test_the_agents_of_a_verifiers_environment_are_segments_of_one_sample(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = verifiers()
    # An environment of the package: two attempts at the task.
    best_of = {"id": "best-of-n", "n": 2, **ENV}
    (row,) = rows(adapter, monkeypatch, capsys, json.dumps(best_of), "1")
    session, policy = open_session(CHATML, ["1", "5"])
    assert rewards(adapter, row, session) == {"agent": {"is_right": 1.0, "is_short": 0.5}}
    assert len(policy.served) == 2
    assert Row(session).num_segments == 2


def test_an_agent_of_verifiers_is_a_role_and_is_trained_as_its_environment_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = verifiers()
    # An environment of the package, whose user is no training data.
    local = {"runtime": {"type": "subprocess"}}
    talk = {"id": "user-sim", "taskset": {"id": "sums_env"}, "assistant": local, "user": local}
    (row,) = rows(adapter, monkeypatch, capsys, json.dumps(talk), "1")
    session, policy = open_session(CHATML, ["what is it ?", "1", "###DONE###"])
    assert rewards(adapter, row, session) == {"assistant": {"is_right": 2.0, "is_short": 0.5}}
    assert len(policy.served) == 3
    calls = credited(session, Row(session).ends)
    assert [(call.role, bool(call.end_tokens), call.reward) for call in calls] == [
        ("user", False, 0.0),
        ("assistant", True, 2.5),
        ("user", False, 0.0),
    ]


def test_a_failed_episode_of_verifiers_is_no_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = verifiers()
    (row,) = rows(adapter, monkeypatch, capsys, json.dumps(ENV), "1")
    session, _ = open_session(CHATML, ["1"], limit=2)
    with pytest.raises(RuntimeError, match="whose limit is 2"):
        asyncio.run(play(adapter, row, session))


@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [(["9", "0"], 0.75, 2), (["1", "2", "3"], -0.75, 3), (["0"], 1.0, 1)],
)
def test_a_gymnasium_environment_reads_and_writes_text(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answers: Sequence[str],
    reward: float,
    turns: int,
) -> None:
    adapter = gymnasium()
    written = rows(adapter, monkeypatch, capsys, "guess_env:Guess-v0", "40")
    assert {row["prompt"] for row in written} == {"guess"}
    number_is_0 = next(row for row in written if adapter.begin(row)[0].unwrapped.number == 0)
    session, policy = open_session(CHATML, answers, prompt="guess")
    assert asyncio.run(play(adapter, number_is_0, session)) == reward
    assert len(policy.served) == turns
    assert Row(session).num_segments == 1, "every turn continues the one before"


def test_an_episode_without_room_ends_as_it_is() -> None:
    adapter = gymnasium()
    session, policy = open_session(CHATML, ["x"] * 9)
    session.max_turns = 2
    row = {"environment": "guess_env:Guess-v0", "seed": 0, "arguments": {"limit": 9}}
    assert asyncio.run(play(adapter, row, session)) == -0.5
    assert len(policy.served) == 2
    assert session.is_truncated


def test_an_environment_without_text_is_refused() -> None:
    adapter = gymnasium()
    session, _ = open_session()
    with pytest.raises(TypeError, match=r"observations of FrozenLake-v1 are Discrete\(16\)"):
        asyncio.run(play(adapter, {"environment": "FrozenLake-v1"}, session))


def test_the_adapters_are_agents_of_a_run() -> None:
    for name in ("gymnasium_text", "verifiers_tasks"):
        agent = compose("grpo_code", [f"rollout.fn=[async_rl.adapters.{name}:play]"]).agent
        assert agent.fn == f"async_rl.adapters.{name}:play"
