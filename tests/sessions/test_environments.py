"""Environments of the real packages verifiers and gymnasium, and an agent that uses mcp."""

import asyncio
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sessions_support import CHATML, Row, endpoint, open_session

from async_rl.config.generation import Agent
from async_rl.rollouts.agents import credited
from async_rl.rollouts.environments import open_environments
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


def play(adapter: Any, row: dict[str, Any], session: Session) -> Any:
    async def main() -> Any:
        async with endpoint(session) as url:
            reached = Endpoint.of(url, session.token, session.session_key)
            return await adapter.play({"row": row}, reached)

    return asyncio.run(main())


def rewards(adapter: Any, row: dict[str, Any], session: Session) -> dict[Any, Any]:
    """The rewards that a played row posts, by role."""
    assert play(adapter, row, session) == 0
    return {reward.role: reward.parts for reward in session.rewards}


Rows = Callable[..., list[Any]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Rows:
    def written(adapter: Any, *words: str) -> list[Any]:
        monkeypatch.setattr(sys, "argv", ["adapter", *words])
        adapter.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return written


def verifiers() -> Any:
    pytest.importorskip("verifiers.v1", reason="make adapters VERIFIERS=0.4.0 installs it")
    return importlib.import_module("async_rl.adapters.verifiers_tasks")


def gymnasium() -> Any:
    pytest.importorskip("gymnasium", reason="make adapters installs it")
    return importlib.import_module("async_rl.adapters.gymnasium_text")


def test_a_verifiers_environment_is_played_and_scored_by_its_rewards(rows: Rows) -> None:
    adapter = verifiers()
    written = rows(adapter, json.dumps(ENV), "3")
    assert [row["prompt"] for row in written] == ["0 + 1", "1 + 1", "2 + 1"]
    for answer, reward in (("3", 2.0), ("7", 0.0)):
        session, policy = open_session(CHATML, [answer])
        found = rewards(adapter, written[2], session)
        assert found == {"agent": {"is_right": reward, "is_short": 0.5}}
        # What is trained is what the policy wrote, a number and the end token.
        tokens = Row(session).tokens
        served = policy.served[0][1].token_ids.tolist()
        assert tokens.token_ids[tokens.is_written].tolist() == served


def test_an_agent_of_verifiers_is_a_role_and_is_trained_as_it_says(rows: Rows) -> None:
    adapter = verifiers()
    # An environment of the package, whose user is no training data.
    local = {"runtime": {"type": "subprocess"}}
    talk = {"id": "user-sim", "taskset": {"id": "sums_env"}, "assistant": local, "user": local}
    (row,) = rows(adapter, json.dumps(talk), "1")
    session, policy = open_session(CHATML, ["what is it ?", "1", "###DONE###"])
    assert rewards(adapter, row, session) == {"assistant": {"is_right": 2.0, "is_short": 0.5}}
    assert len(policy.served) == 3
    calls = credited(session, Row(session).ends)
    assert [(call.role, bool(call.end_tokens), call.reward) for call in calls] == [
        ("user", False, 0.0),
        ("assistant", True, 2.5),
        ("user", False, 0.0),
    ]


def test_a_gymnasium_environment_reads_and_writes_text(rows: Rows) -> None:
    adapter = gymnasium()
    written = rows(adapter, "guess_env:Guess-v0", "40")
    assert {row["prompt"] for row in written} == {"guess"}
    number_is_0 = next(row for row in written if adapter.begin(row)[0].unwrapped.number == 0)
    for answers, reward in ((["9", "0"], 0.75), (["1", "2", "3"], -0.75)):
        session, policy = open_session(CHATML, answers, prompt="guess")
        assert play(adapter, number_is_0, session) == reward
        assert len(policy.served) == len(answers)
        assert Row(session).num_segments == 1, "every turn continues the one before"


TUTORIAL = Path(__file__).parents[2] / "docs/tutorials/own_agent.md"
MCP_SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    return a + b


server.run()
"""


async def test_the_agent_of_the_tutorial_calls_the_tools_of_a_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (program,) = re.findall(r"```python\n# mcp_agent.py\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    (tmp_path / "agent.py").write_text(program)
    (tmp_path / "server.py").write_text(MCP_SERVER)
    words = [sys.executable, f"{tmp_path}/agent.py", sys.executable, f"{tmp_path}/server.py"]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 41}}\n</tool_call>'
    session, _ = open_session(texts=[call, "done"])
    async with endpoint(session) as url:
        reached = Endpoint.of(url, session.token, session.session_key)
        agents = open_environments(Agent(command=words, fn=None, workers=1))
        await agents.run(reached, {"prompt": "go"})
    row = Row(session)
    assert (row.num_segments, session.last_text) == (1, "done")
    read = session.chat.decode(row.tokens.token_ids[~row.tokens.is_written])
    assert "tool\n42" in read
    written = session.chat.decode(row.tokens.token_ids[row.tokens.is_written])
    assert written == call + "done"
