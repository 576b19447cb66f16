"""Facts about the report of `async-rl replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.launchers.commands.replayed_table import replayed


def write(directory: Path, loss: float, checksum: int, *, size: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    metrics = {"loss/policy": loss, "policy/effective_sample_size": size}
    row = {"step": 4, "time_s": 2.0, **metrics}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    published = {"version": 4, "checksum": checksum}
    (directory / "versions.jsonl").write_text(json.dumps(published) + "\n")
    return directory


@pytest.mark.parametrize(
    ("checksum", "is_changed", "size", "weights", "verdict", "is_broken"),
    [
        (7, False, 1.0, "equal", "equal the run's at all 1 compared steps", False),
        (8, False, 1.0, "differ", "differ from the run's from step 4 on", True),
        (8, True, 0.75, "differ", "the smallest effective sample size is 0.75 of 1", False),
        (8, True, 0.25, "differ", "from step 4 on fewer than half of the samples count", False),
    ],
)
def test_each_step_is_next_to_the_recorded_one_with_a_verdict(
    tmp_path: Path,
    checksum: int,
    is_changed: bool,
    size: float,
    weights: str,
    verdict: str,
    is_broken: bool,
) -> None:
    run_dir = write(tmp_path / "run", -1.2345e-05, 7)
    directory = write(run_dir / "replays/1", -2.469e-05, checksum, size=size)
    report, found = replayed(run_dir, directory, is_changed=is_changed)
    table, verdicts = report.sections
    assert table.table is not None
    (row,) = table.table.rows
    assert row[:3] == ("4", "-1.234e-05 -> -2.469e-05", "-")
    assert row[-1] == weights
    assert verdicts.lines[0] == "1 steps in 2.0 s"
    assert verdict in verdicts.lines[1]
    assert found is is_broken


def test_a_version_without_a_recorded_checksum_is_not_compared(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", 1.0, 7)
    directory = write(run_dir / "replays/1", 1.0, 7)
    (run_dir / "versions.jsonl").unlink()
    report, is_broken = replayed(run_dir, directory, is_changed=False)
    assert report.sections[0].table is not None
    assert report.sections[0].table.rows[0][1:] == ("1", "-", "-", "1", "not recorded")
    assert "were not compared" in report.sections[1].lines[1]
    assert not is_broken
