"""`async-rl init`: a small task to start from, with data, a configuration and a test of the data.

Invariants: writes into a new directory only; the data are specs of the embedded task, so that the
embedded model can learn them without changes.
"""

import enum
from importlib import resources
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec
import typer

import async_rl.examples
from async_rl.launchers.commands.options import show_preparation

# Enough to see learning, small enough to check in seconds.
_TRAIN = 512
_HELD_OUT = 128
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
    """What a new task is an example of."""

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
        typer.Option(
            help="directory or hub name of the model; default: the embedded one, made if necessary"
        ),
    ] = None,
) -> None:
    """Write a small working task as a start for your own: problems with tests, a configuration and
    a test.

    Examples: async-rl init my_task; async-rl init my_task --template reward
    """
    from async_rl.composition.compose import compose
    from async_rl.data.prepare import prepare_model

    directory.mkdir(parents=True)
    train, held_out = _rows()
    base, length, extra, example = _PARTS[template]
    for name, rows in (("train.jsonl", train), ("held_out.jsonl", held_out)):
        (directory / name).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    if model is None:
        # The first use makes it in one or two minutes.
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
        f"{directory}: train.jsonl ({len(train)} problems), held_out.jsonl ({len(held_out)}),"
        f" {', '.join(texts)}"
    )
    data = quote(f"{directory}/train.jsonl")
    conf = quote(f"conf={directory}/conf.yaml")
    typer.echo(f"check the data:  async-rl data check {data} {conf}")
    typer.echo(f"run it:          async-rl launch {conf}")


def _rows() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return training and held-out rows: prompt, tests in our layout, reference solution."""
    from async_rl.data.list_functions import Spec, hidden_tests, split, wording

    train, held_out = split()

    def row(spec: Spec) -> dict[str, object]:
        return {
            "id": spec.name,
            "prompt": wording(spec, 0).strip(),
            "tests": msgspec.to_builtins(hidden_tests(spec).tests),
            "solution": spec.solution(),
        }

    rows = [row(spec) for spec in train[:_TRAIN]]
    held_out_rows = [row(spec) for spec in held_out[:_HELD_OUT]]
    return rows, held_out_rows
