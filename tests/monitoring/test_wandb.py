"""Facts about Weights & Biases; the last needs the package, which the lock does not have:

pip install --no-deps --target build/wandb wandb
PYTHONPATH=build/wandb pytest tests/monitoring/test_wandb.py
"""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from composing import compose
from test_recorder import Recorder

from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.machine import Machine
from async_rl.launchers.preflight.checks import preflight
from async_rl.monitoring.wandb_run import WandbRun
from async_rl.protocol.membership import ReportMetrics

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


def test_a_run_is_kept_offline_with_numbers_histograms_and_samples(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; see above")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = WandbRun("tests", tmp_path, config)
    histograms = {"reward/samples": [0.0, 1.0, 1.0], "length/responses": []}
    texts = {"samples/training": "a <b> c"}
    run.hold(ReportMetrics(source="learner-0", step=2, scalars={}, histograms=histograms, texts={}))
    run.hold(ReportMetrics(source="buffer", step=1, scalars={}, histograms={}, texts=texts))
    for step in (1, 2, 3):
        run.log(step, {"reward/mean": 0.25})
    run.close()
    wandb.teardown()  # its own process writes the file to the end
    rows = {row["_step"]: row for row in _rows(tmp_path)}
    assert {row["reward/mean"] for row in rows.values()} == {0.25}
    assert [step for step, row in rows.items() if "samples/training.path" in row] == [1]
    (step,) = [step for step, row in rows.items() if "reward/samples.values" in row]
    counts = rows[step]["reward/samples.values"]
    assert (step, counts[0], counts[-1], sum(counts)) == (2, 1, 2, 3)
    (page,) = tmp_path.rglob("*.html")
    assert "<pre>a &lt;b&gt; c</pre>" in page.read_text()


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a small offline file: a head of 7 bytes, then the records of one LevelDB block,
    each with checksum, length and type before it.
    """
    from wandb.proto import wandb_internal_pb2

    (path,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    data, at, rows = path.read_bytes(), 7, []
    while at < len(data):
        _, size, _ = struct.unpack_from("<IHB", data, at)
        record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + size])
        at += 7 + size
        if record.HasField("history"):
            items = record.history.item
            rows.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows
