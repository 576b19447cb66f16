"""A rank that trains recorded batches again, from the start model or a checkpoint."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from learner_support import make_config, make_groups, make_trainer

from async_rl.core import records
from async_rl.training import replaying
from async_rl.training.checkpoints import VERSIONS_FILE, Published, directory_of
from async_rl.weights.block import SharedTensors


def test_a_replay_has_the_weights_and_metrics_of_the_run_and_ends_where_its_batches_end(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_trainer(model_path, "grpo_code")
    batches = {version + 1: make_groups(version, version=version) for version in range(3)}
    expected: list[tuple[int, int]] = []
    losses: list[float] = []
    with SharedTensors(run.tensor_specs()) as block:
        for step, groups in batches.items():
            losses.append(run.step(groups, step - 1).scalars["loss/policy"])
            expected.append((step, block.write(step, run.full_tensors()).checksum))
            if step == 1:
                run.save(directory_of(tmp_path, 1), 1).result()
    parents: list[int] = []
    monkeypatch.setattr(replaying, "die_with_parent", parents.append)
    # The batches themselves stand for the store that has them.
    monkeypatch.setattr(replaying, "reading", contextlib.nullcontext)
    monkeypatch.setattr(replaying, "batch_of", lambda _, step: batches.get(step))

    def replay(start: int, last: int) -> tuple[int, list[tuple[int, int]], list[dict[str, Any]]]:
        directory = tmp_path / "replays" / f"{start} to {last}"
        directory.mkdir(parents=True)
        config = make_config("grpo_code").model_dump(mode="json")
        (directory / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        argv = ["replaying", str(directory), str(model_path), *map(str, (start, last, 4711, 0))]
        monkeypatch.setattr("sys.argv", argv)
        code = replaying.main()
        published = list(records.read(directory / VERSIONS_FILE, Published))
        assert {each.life for each in published} == {0}, "of no life of the learner"
        rows = list(map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()))
        return code, [(each.version, each.checksum) for each in published], rows

    for start in (0, 1):
        code, weights, rows = replay(start, 3)
        assert (code, weights) == (0, expected[start:])
        assert [(row["step"], row["loss/policy"]) for row in rows] == [
            (step + 1, loss) for step, loss in enumerate(losses) if step >= start
        ]
        assert all(0 <= row["time_s"] == round(row["time_s"], 3) < 60 for row in rows)
    assert replay(1, 4)[:2] == (1, expected[1:])
    assert "DataError: the trajectories of step 4 are no longer in" in capsys.readouterr().err
    assert parents == [4711] * 3
