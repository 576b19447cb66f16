"""How a run is prepared, which signals stop it, and how it ended: that can be read also if the disk
was full or nothing had started.
"""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from composing import compose

from async_rl.composition.compose import write_config
from async_rl.core.errors import RunFailed
from async_rl.monitoring import events
from async_rl.processes.supervisor import run_supervised
from async_rl.runs.status import RunState, status_of
from async_rl.supervision.control import StopRequest
from async_rl.supervision.preparation import prepare
from async_rl.training.checkpoints import directory_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    write_config(compose("grpo_code", ["run_name=mine", "num_steps=9"]), directory / "config.yaml")
    return directory


def test_a_run_that_a_full_disk_ended_has_failed_and_was_not_killed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.reserve_outcome(run_dir)
    reserved = (run_dir / "state.reserved").stat()

    def no_room(path: Path, data: bytes) -> int:
        path.touch()  # the name has room, the content has not
        raise OSError(errno.ENOSPC, "No space left on device")

    in_place = Path.open

    def only_in_place(path: Path, mode: str) -> Any:
        # Emptying the file would give its room to whoever else fills the disk.
        assert mode == "r+b"
        return in_place(path, mode)

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", no_room)
        full.setattr(Path, "open", only_in_place)
        events.write_outcome(
            run_dir, outcome="failed", step=4, cause="the disk is full; " + "é" * 9000
        )
    assert status_of(run_dir).state is RunState.FAILED
    assert status_of(run_dir).cause.startswith("the disk is full; ")
    after = (run_dir / "state.json").stat()
    # Neither a new file nor a longer one: there is no room for them.
    assert (after.st_ino, after.st_size) == (reserved.st_ino, reserved.st_size)
    events.reserve_outcome(run_dir)
    events.write_outcome(run_dir, outcome="finished", step=9, cause="")
    assert status_of(run_dir).state is RunState.FINISHED
    assert not (run_dir / "state.reserved").exists(), "the room is given back"


def test_a_resume_that_fails_before_its_learner_starts_is_at_the_step_of_its_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (3, 6):
        directory_of(run_dir, version).mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "time_s": 2.0}\n{"step": 2, "ti\n')
    config = compose(
        "grpo_code", ["run_name=mine", "num_steps=9", "monitoring.tensorboard_port=null"]
    )
    nothing: Any = None  # nothing is launched
    status = run_supervised(config=config, run_dir=run_dir, launcher=nothing)
    assert status == 1
    said = capsys.readouterr().out
    assert "the run has failed at step 6 of 9" in said
    assert "line 2 of" in said


COUNTED = """echo '{"fraction": 0.5, "text": "5 of 10 prompts"}'"""


@pytest.mark.parametrize(
    ("child", "cause"),
    [
        ('echo \'{"error": "DataError: row 3 is bad"}\'\nexit 1', "^DataError: row 3 is bad$"),
        (f"{COUNTED}\nkill -9 $$", "exited with code -9; see "),
        (COUNTED, "exited with code 0; see "),
    ],
)
async def test_a_preparation_that_fails_ends_the_run_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, cause: str
) -> None:
    (tmp_path / "logs").mkdir()
    script = tmp_path / "child"
    script.write_text(f"#!/bin/sh\n{child}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    seen: list[float] = []
    with pytest.raises(RunFailed, match=cause):
        await prepare(tmp_path, lambda fraction, _: seen.append(fraction))
    assert seen == [0.5] * (COUNTED in child)


async def _received(*numbers: signal.Signals) -> tuple[bool, bool]:
    stop = StopRequest()
    stop.handle_signals()
    for number in numbers:
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    return stop.graceful.done(), stop.immediate.done()


@pytest.mark.parametrize(
    ("hang_up", "numbers", "expected"),
    [
        (signal.SIG_DFL, [signal.SIGHUP], (True, False)),
        (signal.SIG_DFL, [signal.SIGTERM, signal.SIGHUP], (True, False)),
        (signal.SIG_DFL, [signal.SIGINT, signal.SIGINT], (True, True)),
        # Under nohup a run continues without its terminal.
        (signal.SIG_IGN, [signal.SIGHUP], (False, False)),
    ],
)
def test_a_closed_terminal_stops_a_run_in_order(
    hang_up: signal.Handlers, numbers: list[signal.Signals], expected: tuple[bool, bool]
) -> None:
    before = signal.signal(signal.SIGHUP, hang_up)
    try:
        assert asyncio.run(_received(*numbers)) == expected
    finally:
        signal.signal(signal.SIGHUP, before)
