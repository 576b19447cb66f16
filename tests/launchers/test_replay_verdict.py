"""Facts about the sentence with which `async-rl replay` ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.launchers.commands.replay import belief, verdict


def write(directory: Path, checksums: dict[int, int], *, size: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    rows = [{"step": step, "policy/effective_sample_size": size} for step in checksums]
    published = [{"version": step, "checksum": each} for step, each in checksums.items()]
    for name, values in (("metrics", rows), ("versions", published)):
        text = "".join(f"{json.dumps(value)}\n" for value in values)
        (directory / f"{name}.jsonl").write_text(text)
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


def test_a_replay_with_other_settings_says_how_many_samples_still_count(tmp_path: Path) -> None:
    assert "smallest effective share is 0.25" in belief(write(tmp_path / "1", {3: 5}, size=0.25))
