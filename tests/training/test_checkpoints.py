"""The checkpoints that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.training.checkpoints import directory_of, newest, prune, versions


def make(run_dir: Path, *found: int) -> None:
    for version in found:
        directory_of(run_dir, version).mkdir(parents=True)


def test_a_checkpoint_that_is_being_written_is_not_taken_for_one(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    make(tmp_path, 20, 100000, 3)
    (tmp_path / "checkpoints" / "step_200000.partial").mkdir()
    assert versions(tmp_path) == [3, 20, 100000]
    assert newest(tmp_path) == directory_of(tmp_path, 100000)


@pytest.mark.covers("save_freq")
def test_the_newest_and_the_best_of_the_older_ones_are_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6)
    oldest = prune(tmp_path, keep=2, keep_best=2, scores={1: 0.2, 2: 0.9, 4: 0.5, 6: 0.1})
    assert (versions(tmp_path), oldest) == ([2, 4, 5, 6], 5)
    assert prune(tmp_path, keep=2, keep_best=0, scores={}) == 5
    assert versions(tmp_path) == [5, 6]
