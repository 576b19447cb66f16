"""Facts about Weights & Biases."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from composing import compose

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
    said = r"monitoring\.wandb=mine needs the package wandb, .*'async-rl\[wandb\]'"
    with pytest.raises(Exception, match=said):
        preflight(compose("grpo_code", [*where, "monitoring.wandb=mine"]), MACHINE)


def test_rows_are_sent_with_their_steps(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock does not have the package; this one keeps what it is told."""
    told: list[object] = []

    def init(**arguments: object) -> SimpleNamespace:
        if arguments["project"] == "unknown":
            raise ValueError("no such project")
        told.append((arguments["id"], arguments["resume"]))
        return SimpleNamespace(
            log=lambda row, *, step: told.append((step, row)), finish=lambda: told.append("end")
        )

    wandb = SimpleNamespace(Error=ValueError, Settings=dict, init=init)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = WandbRun("tests", tmp_path, config)
    for step in (1, 2):
        run.log(step, {"reward/mean": 0.25 * step})
    run.close()
    rows = [(1, {"reward/mean": 0.25}), (2, {"reward/mean": 0.5})]
    assert told == [(tmp_path.name, "allow"), *rows, "end"]
    with pytest.raises(InfrastructureError, match="no such project; run wandb login"):
        WandbRun("unknown", tmp_path, config)
