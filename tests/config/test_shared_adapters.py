"""Settings of runs that share engines, alone and with those of the run that has the engines."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import pytest
from tables import table

from async_rl.composition.compose import compose, to_yaml
from async_rl.config.generation import LoraAdapter
from async_rl.core.errors import ConfigError
from async_rl.launchers.api import resuming
from async_rl.launchers.preflight.hosts import host_problems
from async_rl.protocol.base import message_schema
from async_rl.runtime.context import Control

LORA = "model.lora=lora"


@pytest.mark.parametrize(("settings", "problem"), table(__file__, "refused"))
def test_settings_that_exclude_each_other_are_refused(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        compose("grpo_code", [LORA, *settings])


def test_neither_setting_exists_without_an_adapter() -> None:
    for setting in ("model.lora.slots=2", "model.lora.host=runs/a"):
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            compose("grpo_code", [setting])


def host(tmp_path: Path, *settings: str) -> Path:
    """The directory of a run as its supervisor leaves it."""
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(to_yaml(compose("grpo_code", settings)))
    control = Control(
        address="tcp://127.0.0.1:1",
        pid=os.getpid(),
        machine=platform.node(),
        model_path="",
        messages=message_schema(),
    )
    (run_dir / "control.json").write_bytes(msgspec.json.encode(control))
    return run_dir


def problems(run_dir: Path, *settings: str) -> list[str]:
    config = compose("grpo_code", [LORA, f"model.lora.host={run_dir}", *settings])
    return list(host_problems(config))


def test_a_run_with_room_is_a_host(tmp_path: Path) -> None:
    run_dir = host(tmp_path, LORA, "model.lora.slots=2", "model.lora.rank=32")
    assert problems(run_dir) == []
    assert problems(run_dir, "model.lora.rank=32", "learner.optimizer.lr=1e-3", "seed=9") == []


@pytest.mark.parametrize(("given", "setting", "problem"), table(__file__, "no_hosts"))
def test_a_run_that_cannot_be_a_host_is_refused(
    tmp_path: Path, given: list[str], setting: str, problem: str
) -> None:
    found = problems(host(tmp_path, *given), *filter(None, [setting]))
    assert len(found) == 1
    assert problem in found[0]


def test_a_host_that_does_not_run_is_refused(tmp_path: Path) -> None:
    assert "is not the directory of a run" in problems(tmp_path / "nowhere")[0]
    run_dir = host(tmp_path, LORA, "model.lora.slots=2")
    (run_dir / "control.json").unlink()
    assert "first has no processes yet" in problems(run_dir)[0]


def test_a_resumed_run_may_have_another_host_but_no_other_rank(tmp_path: Path) -> None:
    run_dir = host(tmp_path, LORA, "model.lora.host=runs/a")
    before = compose("grpo_code", [LORA, "model.lora.host=runs/a"])

    def refused(*settings: str) -> list[str]:
        after = compose("grpo_code", [LORA, *settings])
        changed = resuming.changes(before, after)
        assert changed
        lines = resuming._refusals(run_dir, before, after, changed)
        return [line.partition("=")[0] for line in lines]

    assert refused("model.lora.host=runs/b") == []
    assert refused() == []
    assert refused("model.lora.slots=2") == []
    assert refused("model.lora.host=runs/a", "model.lora.rank=8") == ["model.lora.rank"]


def test_the_directory_of_the_host_is_found_from_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = compose("grpo_code", [LORA, "model.lora.host=runs/a"]).model.lora
    assert isinstance(lora, LoraAdapter)
    assert lora.host == str(tmp_path / "runs" / "a")
