"""Facts about Weights & Biases."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from composing import compose
from test_recorder import Recorder

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.core.machine import Machine
from async_rl.launchers.preflight.checks import preflight
from async_rl.monitoring.wandb_run import WandbRun

MACHINE = Machine(cores=(0, 1), memory_mb=64_000, num_gpus=0)


def test_a_project_without_wandb_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name)
    )
    where = [f"output_dir={tmp_path}", "run_name=x"]
    preflight(compose("grpo_code", where), MACHINE)
    with pytest.raises(
        Exception, match=r"monitoring\.wandb=mine needs the package wandb, .*'async-rl\[wandb\]'"
    ):
        preflight(compose("grpo_code", [*where, "monitoring.wandb=mine"]), MACHINE)


def test_each_row_is_handed_on_once_and_in_order(tmp_path: Path, config: RunConfig) -> None:
    rows: list[tuple[int, dict[str, float]]] = []
    plain = replace(config, evaluation=replace(config.evaluation, every_steps=0))
    recorder = Recorder(
        tmp_path, plain, on_row=lambda step, scalars: rows.append((step, dict(scalars)))
    )
    recorder.record(2, "supervisor", {"throughput/steps_per_s": 2.0})
    recorder.record(1, "learner-0", {"reward/mean": 0.25})
    recorder.record(2, "learner-0", {"reward/mean": 0.5})
    recorder.close()
    assert rows == [
        (1, {"reward/mean": 0.25}),
        (2, {"throughput/steps_per_s": 2.0, "reward/mean": 0.5}),
    ]


class PlayedWandb:
    """The package, which the lock does not have; it keeps what it is told."""

    Error = ValueError

    def __init__(self) -> None:
        self.started: dict[str, object] = {}
        self.logged: list[tuple[int, dict[str, object]]] = []
        self.is_finished = False

    def init(self, **arguments: object) -> PlayedWandb:
        if arguments["project"] == "unknown":
            raise ValueError("no such project")
        self.started = arguments
        return self

    def Settings(self, **settings: object) -> object:
        return settings

    def log(self, row: dict[str, object], *, step: int) -> None:
        self.logged.append((step, row))

    def finish(self) -> None:
        self.is_finished = True


def test_rows_are_sent_with_their_steps(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = PlayedWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = WandbRun("tests", tmp_path, config)
    assert (wandb.started["id"], wandb.started["resume"]) == (tmp_path.name, "allow")
    for step in (1, 2):
        run.log(step, {"reward/mean": 0.25 * step})
    run.close()
    assert wandb.logged == [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5})]
    assert wandb.is_finished
    with pytest.raises(InfrastructureError, match="no such project; run wandb login"):
        WandbRun("unknown", tmp_path, config)
