"""A batch on which the learner fails: its groups are dropped, and training continues."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import parts
import pytest
from world import World, story

from async_rl.core.errors import PartlyTrained


def dropped(world: World) -> list[int]:
    """The versions of the batches that were dropped, once for each of their two groups."""
    with sqlite3.connect(world.run_dir / "store.sqlite") as store:
        rows = store.execute(
            "SELECT train_version FROM groups WHERE reason='untrainable' AND message LIKE '%bad'"
        ).fetchall()
    store.close()
    return [version for (version,) in rows]


def test_a_batch_that_cannot_be_trained_is_dropped_and_another_one_takes_its_place(
    tmp_path: Path,
) -> None:
    # With seeds 3 and 5 three batches of one step are bad, which ends the run.
    world = story(tmp_path, seed=4, bad_batches=0.2, num_steps=20)
    assert (world.codes, world.problems) == ([0], [])
    assert dropped(world), "some batch was bad"
    assert [step.version for step in world.history.steps] == list(range(20))


def test_the_third_batch_that_fails_at_one_step_ends_the_run(tmp_path: Path) -> None:
    """Then the weights or the settings are the cause; a resume may be tried once per batch."""
    world = story(tmp_path, bad_batches=1.0)
    assert world.codes == [1]
    assert "the world made this batch bad" in world.cause
    assert dropped(world) == [0] * 6


def test_weights_that_were_changed_before_the_failure_are_loaded_again_by_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "NonFiniteError", PartlyTrained)
    # With seeds 3 and 5 three batches of one step are bad, which ends the run.
    world = story(tmp_path, seed=4, bad_batches=0.2, num_steps=20)
    assert (world.codes, world.problems) == ([0], [])
    assert dropped(world)
    lives = [line for line in world.log if "learner-0 started" in line]
    assert len(lives) > 1, "the changed weights are of no use"
