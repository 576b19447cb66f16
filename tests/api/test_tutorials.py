"""The files in docs/migrate.md and in own_environment.md and own_task.md of docs/tutorials work."""

import asyncio
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIALS = DOCS / "tutorials"
BLOCK = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```", re.M | re.S)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the files of the tutorials."""
    modules = {}
    pages = [TUTORIALS / f"own_{name}.md" for name in ("environment", "task")]
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


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("second", "score"), [("pass", 0.5), ("timeout", 0.0)])
def test_the_environment_rewards_the_number_of_attempts(second: str, score: float) -> None:
    environment, verdicts, read = module("my_environment"), iter(["wrong_answer", second]), []

    async def write(max_tokens: int) -> str:
        return f"program of at most {max_tokens}"

    async def judged(program: str, tests: list[str]) -> list[SimpleNamespace]:
        assert tests == ["shown"]
        return [SimpleNamespace(verdict=next(verdicts), message="gave 3")]

    given = {"tests": ["first", "shown", "third"], "prompt": SimpleNamespace(text="PROMPT")}
    talk = SimpleNamespace(write=write, test=judged, tell=read.append, **given)
    response = asyncio.run(environment.play(talk))
    assert environment.score(SimpleNamespace(response=response)) == score
    assert read == ["\n# gave 3\nPROMPT"]
    assert environment.score(SimpleNamespace(response="def f(")) == 0.0


@pytest.mark.usefixtures("files")
def test_the_loss_passes_the_test_of_its_tutorial_and_a_reward_of_trl_scores_a_sample() -> None:
    module("test_my_loss").test_the_gradient_is_zero_at_the_edge()
    rewards = module("my_rewards")
    row = {"prompt": "Say hello.", "limit": 5}
    samples = [SimpleNamespace(prompt="P", response=text, row=row) for text in ("hello", "hello!")]
    assert [rewards.score(sample) for sample in samples] == [1.0, 0.0]
