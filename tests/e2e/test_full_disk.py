"""A disk that is full in the middle of a run: a clear sentence, nothing lost, and the run goes on
once there is room.

A limit on the size of files (RLIMIT_FSIZE), set on running processes, stands for the disk; the
system refuses the same writes.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
from e2e_support import SMALL, LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Launch = Callable[..., LiveRun]
QUICK = (
    *SMALL,
    "timeouts.call_s=10",
)
NO_ROOM = (65_536, resource.RLIM_INFINITY)


def test_a_store_that_cannot_grow_for_a_moment_costs_a_restart_of_the_buffer_and_nothing_else(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=14")
    run.until(lambda: run.step >= 3, "step 3")
    resource.prlimit(run.pid_of("buffer"), resource.RLIMIT_FSIZE, NO_ROOM)
    assert run.wait() == 0, run.terminal
    log = (run.run_dir / "logs" / "supervisor.log").read_text()
    assert "store.sqlite cannot be written" in log
    assert log.count("buffer started") == 2
    assert run.audit()["problems"] == []
    assert [row["step"] for row in run.rows] == list(range(1, 15))


def test_a_full_disk_ends_the_run_with_what_to_do_and_resume_goes_on_when_there_is_room(
    launch: Launch,
) -> None:
    run = launch(*QUICK, "num_steps=12", "checkpoint.every_steps=2", "supervisor.max_restarts=1")
    run.until(lambda: (run.run_dir / "checkpoints" / "step_000002").is_dir(), "a checkpoint")
    for process in ("buffer", "learner-0"):
        resource.prlimit(run.pid_of(process), resource.RLIMIT_FSIZE, NO_ROOM)
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, NO_ROOM)
    assert run.wait() == 1
    assert "could not be written" in run.terminal or "cannot be written" in run.terminal
    assert "free disk space" in run.terminal
    assert "Traceback" not in run.terminal
    assert run.processes() == []
    assert run.audit()["problems"] == []
    resumed = launch(resumes=True)
    assert resumed.wait() == 0, resumed.terminal
    assert resumed.audit()["problems"] == []
    assert [row["step"] for row in resumed.rows] == list(range(1, 13))
