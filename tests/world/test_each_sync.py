"""A power loss at every fourth sync of a run that launches, saves, prunes, copies to a mirror and
resumes.

Between two syncs the disk keeps a drawn part of what is not synced (disk.py).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from unittest import mock

import pytest
from disk import Disk, fsync
from world import Fault, World, clear, story

from async_rl.core.checksums import damage
from async_rl.runs.status import config_of
from async_rl.training import checkpoints
from async_rl.training.mirror import Mirror


def run(path: Path, fault: Fault, cut_at_sync: int) -> World:
    clear(path)
    # Where the copies go is there before the run.
    (path / "other" / "copies").mkdir(parents=True)
    return story(
        path,
        [fault],
        seed=5,
        has_disk=True,
        cut_at_sync=cut_at_sync,
        num_steps=3,
        generators__count=1,
        checkpoint__every_steps=1,
        checkpoint__keep=2,
        checkpoint__mirror=str(path / "other" / "copies"),
    )


@pytest.mark.parametrize("kind", ["power_loss", "damage_checkpoint"])
def test_each_complete_checkpoint_and_copy_survives_a_power_loss_at_any_sync(
    tmp_path: Path, kind: str
) -> None:
    # After two of three checkpoints. A damaged checkpoint is written, and copied, a second time.
    fault = Fault(5.5, kind)
    uncut = run(tmp_path, fault, 0)
    assert uncut.problems == []
    assert uncut.disk is not None
    # Every fourth sync: the cuts at the others find no missing call of fsync that these do not.
    broken = {n: run(tmp_path, fault, n).problems for n in range(2, uncut.disk.num_syncs + 1, 4)}
    assert {number: problems for number, problems in broken.items() if problems} == {}


def test_a_run_that_is_fetched_from_its_copy_is_whole_or_absent_after_a_power_loss(
    tmp_path: Path,
) -> None:
    world = run(tmp_path, Fault(6.5, "scale"), 0)
    assert world.problems == []
    images: list[dict[str, bytes | None]] = []
    clear(world.run_dir)
    disk = Disk(tmp_path, random.Random(1), lambda number: images.append(disk.image()))
    with disk, mock.patch.object(os, "fsync", fsync):
        Mirror(str(tmp_path / "other" / "copies"), world.run_dir).fetch()
        images.append(disk.image())
    for image in images:
        with disk:
            disk.restart(image)
        if world.run_dir.exists():
            assert config_of(world.run_dir).num_steps == 3
            assert damage(checkpoints.directory_of(world.run_dir, 3)) == ""
    assert world.run_dir.exists()


@pytest.mark.parametrize(("seed", "number"), [(17, 2), (22, 3)])
def test_a_row_of_metrics_does_not_outlive_the_evaluation_that_it_describes(
    tmp_path: Path, seed: int, number: int
) -> None:
    # The row is in the page cache when the power is lost, and may reach the disk before the store.
    lost = Fault(0.0, "at_message", ("ReportMetrics", "returned", number, "power_loss", ""))
    settings = {"evaluation__every_steps": 1}
    assert story(tmp_path, [lost], seed=seed, has_disk=True, **settings).problems == []
