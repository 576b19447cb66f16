"""What is found in the first rows of data files before a run starts."""

import json
from pathlib import Path

import pytest
from tables import table

from async_rl.composition.compose import compose
from async_rl.launchers.preflight.inputs import row_problems

GOOD = {"prompt": "add the numbers", "tests": [{"kind": "stdin", "input": "1", "output": "1"}]}


def problems(tmp_path: Path, rows: list[dict[str, object]] | str, *words: str) -> list[str]:
    file = tmp_path / "rows.jsonl"
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    file.write_text(text)
    overrides = [f"data.train_files=[{file}]", "model.path=owner/name", "evaluation.every_steps=0"]
    return list(row_problems(compose("grpo_code", [*overrides, *words])))


@pytest.mark.parametrize(("rows", "reason"), table(__file__, "unusable"))
def test_a_row_that_cannot_be_used_is_named_once(
    tmp_path: Path, rows: list[dict[str, object]] | str, reason: str
) -> None:
    listed = problems(tmp_path, rows)
    assert len(listed) == 1, listed
    assert listed[0].startswith("data.train_files: ")
    assert reason in listed[0]


def test_an_engine_or_a_root_file_system_that_is_missing_is_named(tmp_path: Path) -> None:
    test = {"kind": "container", "image": "my", "command": ["true"]}
    rows: list[dict[str, object]] = [{"prompt": "x", "tests": [test]}] * 2
    (tmp_path / "podman").write_text("#!/bin/sh\necho null")
    (tmp_path / "podman").chmod(0o755)
    (listed,) = problems(tmp_path, rows, "sandbox.container_engine=[no-such-engine]")
    assert "containers need no-such-engine, which does not work here: No such file" in listed
    engine = f"sandbox.container_engine=[{tmp_path}/podman]"
    (listed,) = problems(tmp_path, rows, engine, f"sandbox.rootfs={{my: {tmp_path}/none}}")
    assert "none is not a directory of this machine" in listed
    assert problems(tmp_path, rows, engine, f"sandbox.rootfs={{my: {tmp_path}}}") == []


def test_rows_that_may_be_dropped_and_later_ones_are_left_to_the_run(tmp_path: Path) -> None:
    assert problems(tmp_path, [GOOD, {"prompt": "x"}], "data.bad_rows=drop") == []
    assert problems(tmp_path, [GOOD] * 20 + [{}]) == []
    assert len(problems(tmp_path, [GOOD] * 19 + [{}])) == 1
    # A byte order mark is no part of a row.
    assert problems(tmp_path, "\ufeff" + json.dumps(GOOD)) == []
