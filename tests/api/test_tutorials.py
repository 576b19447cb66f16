"""The files and commands in docs/migrate.md and in own_environment.md, own_agent.md and own_task.md
of docs/tutorials work.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import async_rl
from async_rl.core.machine import this_machine
from async_rl.launchers.api.starting import checked_config
from async_rl.launchers.commands.options import split_conf

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = DOCS / "tutorials"
BLOCK = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```", re.M | re.S)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the files of the tutorials."""
    modules = {}
    pages = [TUTORIALS / f"own_{name}.md" for name in ("environment", "agent", "task")]
    for path in (*pages, DOCS / "migrate.md"):
        modules.update(BLOCK.findall(path.read_text()))
    for module, text in modules.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in modules:
        importlib.sys.modules.pop(module, None)


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@dataclass
class FakeTalk:
    """A conversation in which the policy's programs and their verdicts are given."""

    verdicts: list[str]
    tests: list[str] = field(default_factory=lambda: ["first", "shown", "third"])
    prompt: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(text="PROMPT"))
    read: list[str] = field(default_factory=list)

    async def write(self, max_tokens: int) -> str:
        return f"program of at most {max_tokens}"

    async def test(self, program: str, tests: list[str]) -> list[SimpleNamespace]:
        assert tests == ["shown"]
        return [SimpleNamespace(verdict=self.verdicts.pop(0), message="gave 3")]

    def tell(self, text: str) -> None:
        self.read.append(text)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("verdicts", "score", "read"),
    [
        (["wrong_answer", "pass"], 0.5, ["\n# gave 3\nPROMPT"]),
        (["wrong_answer", "timeout"], 0.0, ["\n# gave 3\nPROMPT"]),
    ],
)
def test_the_environment_rewards_the_number_of_attempts(
    verdicts: list[str], score: float, read: list[str]
) -> None:
    environment, talk = module("my_environment"), FakeTalk(verdicts)
    response = asyncio.run(environment.play(talk))
    assert environment.score(SimpleNamespace(response=response)) == score
    assert talk.read == read
    assert environment.score(SimpleNamespace(response="def f(")) == 0.0


def commands(tutorial: str) -> list[list[str]]:
    """The launches of a tutorial, except of the configuration that `async-rl init` writes."""
    lines = re.findall(
        r"^\$ async-rl launch (?!conf=my_task)(.*)$", (TUTORIALS / tutorial).read_text(), re.M
    )
    return [[w for w in shlex.split(line) if not w.startswith("--")] for line in lines]


@pytest.mark.usefixtures("files")
def test_the_agent_of_the_tutorial_corrects_a_program_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, asked = module("agent"), []
    shown = iter(["Traceback\nNameError: y", "3"])

    def create(**request: object) -> SimpleNamespace:
        asked.append(request["messages"][:])  # type: ignore[index]
        message = {"role": "assistant", "content": f"program {len(asked)}"}
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(**message))])

    completions = SimpleNamespace(create=create)
    client = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    monkeypatch.setattr(agent, "run_python", lambda program, call: next(shown))
    assert agent.solve(client, "policy", "TASK") == ("program 2", "3")
    assert asked[1][-1] == {"role": "user", "content": "# NameError: y\nTASK"}


@pytest.mark.usefixtures("files")
def test_the_loss_passes_the_test_of_its_tutorial_and_a_reward_of_trl_scores_a_sample() -> None:
    module("test_my_loss").test_the_gradient_is_zero_at_the_edge()
    rewards = module("my_rewards")
    row = {"prompt": "Say hello.", "limit": 5}
    samples = [SimpleNamespace(prompt="P", response=text, row=row) for text in ("hello", "hello!")]
    assert [rewards.score(sample) for sample in samples] == [1.0, 0.0]


@pytest.mark.usefixtures("files")
def test_the_commands_of_the_tutorials_can_start_and_a_wrong_name_is_refused() -> None:
    for tutorial in ("own_environment.md", "own_agent.md", "own_task.md"):
        for words in commands(tutorial):
            check(words)
    words = [word.replace(":simple", ":simpler") for word in commands("own_task.md")[0]]
    with pytest.raises(async_rl.ConfigError, match="has no function simpler"):
        check(words)


def check(words: list[str]) -> None:
    conf, overrides = split_conf(words)
    assert conf is not None
    checked_config(conf, overrides, this_machine())
