"""`async-rl init`: a small task to start from, with data, a configuration and a test of the data.

Invariants: writes into a new directory only; the data are specs of the embedded task, so that the
embedded model can learn them without changes.
"""

import enum
import itertools
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer

import async_rl.examples
from async_rl.launchers.commands.options import show_preparation

# Enough to see learning, small enough to check in seconds.
_PROBLEMS = {"train": 512, "held_out": 128}
_CONF = """# Other settings keep their values from conf/; any of them can be changed here.
# ${{beside:x}} is the file x in the directory of this file.
defaults:
  - {base}
  - _self_
data:
  train_files: ["${{beside:train.jsonl}}"]
  val_files: ["${{beside:held_out.jsonl}}"]
  max_prompt_tokens: 64
  max_response_tokens: {length}
model:
  path: "{model}"
"""
_REWARD = '''"""A reward of your own: a function receives one sample and returns a number."""


def score(sample) -> float:
    """Prefer short programs; sample.row has every column of the row."""
    return 1.0 if len(sample.response) < 120 else 0.0
'''
_TEST = '''"""Every row has a prompt, tests, and a reference solution that passes them."""

import json
from pathlib import Path

HERE = Path(__file__).parent


def test_every_reference_solution_passes_its_tests() -> None:
    for name in ("train.jsonl", "held_out.jsonl"):
        for line in (HERE / name).read_text().splitlines():
            row = json.loads(line)
            names: dict = {}
            exec(row["solution"], names)  # trusted; a model's programs run in the jail only
            for test in row["tests"]:
                assert names[test["function"]](*test["args"]) == test["expected"], row["prompt"]
'''


class Template(enum.StrEnum):
    """The subject of a new task."""

    CODE = "code"
    REWARD = "reward"
    TOOL = "tool"
    AGENT = "agent"


_PARTS = {
    Template.CODE: ("grpo_code", 64, "", ""),
    Template.REWARD: (
        "grpo_code",
        64,
        """reward:
  terms:
    tests: {kind: tests}
    mine: {kind: plugin, fn: "${beside:reward.py}:score", weight: 0.1}
""",
        "",
    ),
    Template.TOOL: (
        "grpo_code_retry",
        176,
        'rollout:\n  fn: "${beside:tool.py}:rollout"\n',
        "run_and_retry",
    ),
    Template.AGENT: (
        "agent_code",
        176,
        'rollout:\n  fn: ["${beside:agent.py}:solve"]\n',
        "tool_agent",
    ),
}
"""The configuration that a template builds on, tokens of a response (solutions of the embedded task
have at most 43), its own settings, and the example in async_rl/examples that it copies.
"""


def init(
    directory: Annotated[Path, typer.Argument(help="a new directory for the task")],
    template: Annotated[
        Template, typer.Option(help="what the task shows how to write")
    ] = Template.CODE,
    model: Annotated[
        str | None,
        typer.Option(help="directory or hub name of the model; default: the embedded one"),
    ] = None,
) -> None:
    """Write a small working task as a start for your own: problems with tests, a configuration and
    a test.

    Examples: async-rl init my_task; async-rl init my_task --template reward
    """
    from async_rl.composition.compose import compose
    from async_rl.data.model_files import prepare_model

    directory.mkdir(parents=True)
    base, length, extra, example = _PARTS[template]
    for part, number in _PROBLEMS.items():
        (directory / f"{part}.jsonl").write_bytes(_rows(part, number))
    if model is None:
        model = str(prepare_model(compose(base), show_preparation))
    conf = _CONF.format(base=base, length=length, model=model)
    texts = {"conf.yaml": conf + extra, "test_task.py": _TEST}
    if template is Template.REWARD:
        texts["reward.py"] = _REWARD
    elif example:
        source = resources.files(async_rl.examples) / f"{example}.py"
        texts[f"{template}.py"] = source.read_text()
    for name, text in texts.items():
        (directory / name).write_text(text)
    typer.echo(
        f"{directory}: train.jsonl ({_PROBLEMS['train']} problems), held_out.jsonl"
        f" ({_PROBLEMS['held_out']}), {', '.join(texts)}"
    )
    data = quote(f"{directory}/train.jsonl")
    conf = quote(f"conf={directory}/conf.yaml")
    typer.echo(f"check the data:  async-rl data check {data} {conf}")
    typer.echo(f"run it:          async-rl launch {conf}")


def _rows(part: str, most: int) -> bytes:
    """Return rows of the embedded task, each spec once, as JSON lines: prompt, tests in our layout,
    reference solution.
    """
    from async_rl.data.files import read_rows
    from async_rl.data.prompts import embedded_rows

    lines = []
    for _, row in itertools.islice(read_rows(embedded_rows(part)), most):
        row["tests"] = msgspec.json.decode(row["tests"])
        lines.append(msgspec.json.encode(row) + b"\n")
    return b"".join(lines)
