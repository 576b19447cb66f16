"""`async-rl init`: a small task to start from, with data, a configuration and a test of the data.

Invariants: writes into a new directory only; the data are specs of the embedded task, so that the
embedded model can learn them without changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from async_rl.core.errors import ConfigError

# Enough to see learning, small enough to check in seconds.
_TRAIN, _HELD_OUT = 512, 128
_CONF = """# GRPO on the problems beside this file. Other settings keep their values from conf/; any
# of them can be changed here.
defaults:
  - grpo_code
  - _self_
data:
  train_files: ["{directory}/train.jsonl"]
  val_files: ["{directory}/held_out.jsonl"]
  max_prompt_tokens: 64
  max_response_tokens: 64
model:
  path: "{model}"
"""
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


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="a new directory for the task")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="directory or hub name of the model; default: the embedded one, made if necessary"
        ),
    ] = None,
) -> None:
    """Write a small working task as a start for your own: problems with tests, a configuration and
    a test.

    Examples: async-rl init my_task; async-rl init my_task --model /models/mine
    """
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be made ({error.strerror}); give a directory that does not"
            " exist yet"
        ) from error
    train, held_out = _rows()
    for name, rows in (("train.jsonl", train), ("held_out.jsonl", held_out)):
        (directory / name).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    (directory / "conf.yaml").write_text(
        _CONF.format(directory=directory.absolute(), model=model or _embedded_model())
    )
    (directory / "test_task.py").write_text(_TEST)
    typer.echo(
        f"{directory}: train.jsonl ({len(train)} problems), held_out.jsonl ({len(held_out)}),"
        " conf.yaml, test_task.py"
    )
    typer.echo(f"check the data:  async-rl verify {directory}/train.jsonl --references")
    typer.echo(f"run it:          async-rl launch conf={directory}/conf.yaml")


def _embedded_model() -> Path:
    """Return the directory of the embedded model; the first use makes it in one or two minutes."""
    from async_rl.data.prepare import prepare_model
    from async_rl.launchers.configuration.compose import compose

    return prepare_model(compose("grpo_code"), lambda _, text: typer.echo(text, err=True))


def _rows() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return training and held-out rows: prompt, tests in our layout, reference solution."""
    from async_rl.data.embedded import LIST_FUNCTIONS
    from async_rl.data.list_functions import HiddenTests, Spec, split, wording

    tests = HiddenTests(LIST_FUNCTIONS)
    train, held_out = split(LIST_FUNCTIONS)

    def row(spec: Spec) -> dict[str, object]:
        return {
            "id": spec.name,
            "prompt": wording(spec, 0).strip(),
            "tests": msgspec.to_builtins(tests(spec).tests),
            "solution": spec.solution(),
        }

    rows = [row(spec) for spec in train[:_TRAIN]]
    held_out_rows = [row(spec) for spec in held_out[:_HELD_OUT]]
    return rows, held_out_rows
