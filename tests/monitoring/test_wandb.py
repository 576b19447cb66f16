"""Facts about Weights & Biases; the last needs it installed, which the lock does not: pip install
wandb in a copy of the environment.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.launchers.configuration.compose import compose
from async_rl.launchers.configuration.preflight import preflight
from async_rl.monitoring.recorder import Recorder
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


def test_a_run_is_kept_offline_with_its_numbers(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun("tests", tmp_path, config)
    run.log(1, {"reward/mean": 0.25})
    run.close()
    (written,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in written.read_bytes()
