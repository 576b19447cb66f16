"""Facts about Weights & Biases."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_rl.config.run import RunConfig
from async_rl.core.errors import InfrastructureError
from async_rl.monitoring.exports import WandbRun


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
