"""Facts about `async-rl init`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.launchers import cli
from async_rl.launchers.configuration.compose import compose


def init(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["async-rl", "init", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_new_task_has_a_configuration_that_composes_and_data_that_pass_their_own_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "mine"
    assert init(monkeypatch, str(task), "--model", str(tmp_path)) == 0
    config = compose(str(task / "conf.yaml"))
    assert (config.data.train_files, config.data.val_files) == (
        [str(task / "train.jsonl")],
        [str(task / "held_out.jsonl")],
    )
    assert config.model.path == str(tmp_path)
    rows = {
        name: [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    }
    assert {row["id"] for row in rows["train"]}.isdisjoint(row["id"] for row in rows["held_out"])
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(task)],
        cwd=task,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tested.returncode == 0, tested.stdout


def test_a_directory_that_exists_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(monkeypatch, str(tmp_path)) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
