"""Facts about `async-rl init`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from empty_model import write_model

from async_rl.composition.compose import compose
from async_rl.core.machine import this_machine
from async_rl.launchers import cli
from async_rl.launchers.preflight.checks import preflight


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


@pytest.mark.parametrize("template", ["code", "math", "reward", "tool", "agent"])
def test_every_template_composes_and_passes_the_checks_of_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    model = write_model(tmp_path / "model")
    task = tmp_path / "mine"
    assert init(monkeypatch, str(task), "--template", template, "--model", str(model)) == 0
    # A directory can be moved, since its files are named relative to the configuration.
    moved = task.rename(tmp_path / "moved")
    assert str(tmp_path / "mine") not in (moved / "conf.yaml").read_text()
    config = compose(str(moved / "conf.yaml"), [f"output_dir={tmp_path}/runs"])
    preflight(config, this_machine())
    assert config.data.train_files == [str(moved / "train.jsonl")]
    own = {
        "reward": str(config.reward.terms.get("mine")),
        "tool": str(config.rollout.fn),
        "agent": str(config.agent.fn),
    }
    assert str(moved) in own.get(template, str(moved))


def test_a_task_in_words_needs_a_model_that_writes_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(monkeypatch, str(tmp_path / "sums"), "--template", "math") == 2
    assert "the embedded model writes programs only; give --model" in capsys.readouterr().err


def test_a_directory_that_exists_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(monkeypatch, str(tmp_path)) == 2
    assert "does not exist yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
