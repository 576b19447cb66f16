"""What prevents a run from continuing is told in one clear sentence, and nothing of it is lost.

Ports that are taken, a store that another process holds, a machine that is gone, a disk that is
full. All happen to copies of one run that has ended.
"""

import contextlib
import fcntl
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_support import LiveRun
from resumed_run import LAST, Resumed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_ROOM = (65_536, resource.RLIM_INFINITY)
"""A limit on the size of files, set on running processes, stands for a full disk: the system
refuses the same writes.
"""


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def ends_with(run: LiveRun, code: int, *sentences: str) -> None:
    """It says so and nothing else, leaves nothing running, and has lost nothing."""
    assert run.wait(timeout_s=120) == code, run.terminal
    said = " ".join(run.terminal.split())
    assert [sentence for sentence in sentences if sentence not in said] == [], run.terminal
    assert "Traceback" not in said
    assert run.processes() == []
    assert run.audit()["problems"] == []


@contextlib.contextmanager
def taken_ports(run_dir: Path) -> Iterator[tuple[list[str], int, list[str]]]:
    settings = ("monitoring.prometheus_port", "monitoring.tensorboard_port")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in settings]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
            each.listen()
        ports = [each.getsockname()[1] for each in sockets]
        given = [f"{setting}={port}" for setting, port in zip(settings, ports, strict=True)]
        refused = "cannot be bound (Address already in use); choose another address"
        named = zip(given, ports, strict=True)
        yield given, 2, [f"{one}: 127.0.0.1:{port} {refused}" for one, port in named]


@contextlib.contextmanager
def locked_store(run_dir: Path) -> Iterator[tuple[list[str], int, list[str]]]:
    with (run_dir / "store.sqlite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield [], 1, ["store.sqlite is written by another process; end that process first"]


@pytest.mark.parametrize("happens", [taken_ports, locked_store])
def test_a_resume_that_cannot_start_says_why_and_changes_nothing(
    launch: Callable[..., LiveRun], copied: Path, happens: Callable[[Path], Any]
) -> None:
    before = checkpoints(copied)
    with happens(copied) as (settings, code, sentences):
        run = launch("num_steps=20", "checkpoint.mirror=null", *settings, resumes=True)
        ends_with(run, code, *sentences)
    assert checkpoints(copied) == before


def test_a_run_continues_on_another_machine_until_that_has_no_room(
    resumed: Resumed, tmp_path: Path
) -> None:
    copies = shutil.copytree(resumed.copies, tmp_path / "copies", copy_function=os.link)
    there = LiveRun(
        tmp_path / "there",
        "num_steps=400",
        f"checkpoint.mirror={copies}",
        "supervisor.max_restarts=1",
        resumes=True,
        copy=f"file://{copies}/run",
    )
    try:
        there.until((copies / "run" / "step_000012.complete").is_file, "a copied checkpoint")
        for process in ("buffer", "learner-0", "learner-1"):
            resource.prlimit(there.pid_of(process), resource.RLIMIT_FSIZE, NO_ROOM)
        resource.prlimit(there.process.pid, resource.RLIMIT_FSIZE, NO_ROOM)
        ends_with(there, 1, "free disk space")
    finally:
        there.end()
    # Which process is the first to notice is up to the machine.
    assert re.search(r"(could not be|cannot be) (written|used)", there.terminal), there.terminal
    assert "step_000012" in checkpoints(there.run_dir)
    steps = [row["step"] for row in there.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > LAST
