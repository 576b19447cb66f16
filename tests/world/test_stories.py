"""What a person is told about, and can do in, a run whose processes die, hang or stand still, or
whose batches cannot be trained.
"""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import parts
import pytest
from world import Fault, World, story

from async_rl.core.errors import PartlyTrained

LONG = 10_000


def lines(world: World, text: str) -> list[str]:
    return [line for line in world.log if text in line]


def test_a_learner_that_dies_too_often_ends_the_run_with_the_cause_first(tmp_path: Path) -> None:
    world = story(
        tmp_path, [Fault(5.0, "kill", ("learner-0",))], num_steps=LONG, supervisor__max_restarts=0
    )
    assert world.codes == [1]
    assert world.cause.startswith("learner-0 was ended by SIGKILL")


def test_a_generator_that_hangs_in_a_push_is_cut_off_and_no_other(tmp_path: Path) -> None:
    # A push is cut off after 10 s (start_s / 3), long before the silence of 45 s (1.5 call_s).
    world = story(
        tmp_path,
        [Fault(3.0, "stop_in_push", ("generator-1", 500.0))],
        timeouts__start_s=30.0,
        timeouts__call_s=30.0,
        num_steps=40,
    )
    assert world.problems == []
    assert [text.partition(":")[0] for text in world.history.expelled] == ["generator-1"]
    assert lines(world, "the learner removed generator-1: version")


def test_a_process_that_hangs_is_found_by_its_silence(tmp_path: Path) -> None:
    for name in ("generator-0", "buffer", "learner-0", "verifier-0"):
        world = story(tmp_path / name, [Fault(5.0, "stop", (name, 500.0))], num_steps=20)
        assert world.problems == []
        assert lines(world, f"{name} is silent: no heartbeat for 3 s")
        assert lines(world, f"{name} sent no heartbeat for 15 s; restarting {name}")


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    world = story(tmp_path, [Fault(6.0, "interrupt")], num_steps=LONG, checkpoint__every_steps=0)
    assert (world.codes, world.problems) == ([0], [])
    assert lines(world, "the run has stopped")
    assert world.history.saves == [world.history.steps[-1].version + 1]


def test_a_second_ctrl_c_ends_a_run_whose_learner_hangs(tmp_path: Path) -> None:
    faults = [
        Fault(6.0, "stop", ("learner-0", 500.0)),
        Fault(7.0, "interrupt"),
        Fault(8.0, "interrupt"),
    ]
    world = story(tmp_path, faults, num_steps=LONG)
    assert world.codes == [0]
    assert lines(world, "stopped immediately; resume continues from the last checkpoint")
    assert world.loop.time() - 1000.0 < 10.0


def test_sigterm_of_a_batch_system_twice_is_still_an_orderly_stop(tmp_path: Path) -> None:
    terminate = Fault(6.0, "interrupt", (signal.SIGTERM,))
    world = story(tmp_path, [terminate, terminate], num_steps=LONG)
    assert (world.codes, world.problems) == ([0], [])
    assert not lines(world, "stopped immediately")


def test_a_run_that_stands_still_says_who_holds_it_up_and_ends_at_its_limit(tmp_path: Path) -> None:
    world = story(
        tmp_path,
        [Fault(6.0, "stop", ("learner-0", 50_000.0))],
        # Nothing but the stall may end a process here: it comes after 10 start_s.
        timeouts__start_s=40.0,
        timeouts__call_s=300.0,
        num_steps=LONG,
    )
    assert world.codes == [1]
    assert world.cause.startswith("no learner step after version")
    assert "learner-0 has sent no heartbeat for" in world.cause
    assert "is held back by admission: the learner is behind" in world.cause
    assert "(10 timeouts.start_s = 400 s)" in world.cause


def test_processes_come_and_go_while_the_learner_continues(tmp_path: Path) -> None:
    faults = [
        Fault(5.0, "scale", kinds={"generators": 3, "verifiers": 2}),
        Fault(15.0, "scale", kinds={"generators": 1, "verifiers": 1}),
        Fault(25.0, "scale", kinds={"generators": 2}),
    ]
    world = story(tmp_path, faults, num_steps=60)
    assert world.problems == []
    assert len(lines(world, " has left")) == 3
    assert not lines(world, "; restarting"), "who left was taken for lost"
    assert len(lines(world, "learner-0 started")) == 1


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
