"""Facts about the sentence with which `async-rl replay` ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.launchers.commands.replay import verdict


def write(directory: Path, checksums: dict[int, int]) -> Path:
    directory.mkdir(parents=True)
    published = [{"version": step, "checksum": each} for step, each in checksums.items()]
    text = "".join(f"{json.dumps(value)}\n" for value in published)
    (directory / "versions.jsonl").write_text(text)
    return directory


@pytest.mark.parametrize(
    ("recorded", "own", "sentence", "is_equal"),
    [
        ({3: 5, 4: 7}, {3: 5, 4: 7}, "equal the run's at all 2 compared steps", True),
        ({3: 5, 4: 7}, {3: 5, 4: 8}, "differ from the run's from step 4 on", False),
        ({4: 7}, {3: 5, 4: 7}, "equal the run's at all 1 compared steps", True),
        ({}, {3: 5}, "were not compared", True),
    ],
)
def test_the_first_step_with_other_weights_is_named(
    tmp_path: Path, recorded: dict[int, int], own: dict[int, int], sentence: str, is_equal: bool
) -> None:
    run_dir = write(tmp_path / "run", recorded)
    found = verdict(run_dir, write(run_dir / "replays/1", own))
    assert sentence in found[0]
    assert found[1] is is_equal
