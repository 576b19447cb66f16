"""A run that has ended continues on another machine until that has no room, and nothing is lost."""

import os
import re
import resource
import shutil
from pathlib import Path

import pytest
from e2e_support import LiveRun
from resumed_run import LAST, Resumed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_ROOM = (65_536, resource.RLIM_INFINITY)
"""A limit on the size of files, set on running processes, stands for a full disk: the system
refuses the same writes.
"""


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
        assert there.wait(timeout_s=120) == 1, there.terminal
    finally:
        there.end()
    said = " ".join(there.terminal.split())
    assert "free disk space" in said, there.terminal
    assert "Traceback" not in said
    assert there.processes() == []
    assert there.audit()["problems"] == []
    # Which process is the first to notice is up to the machine.
    assert re.search(r"(could not be|cannot be) (written|used)", there.terminal), there.terminal
    assert (there.run_dir / "checkpoints" / "step_000012").is_dir()
    steps = [row["step"] for row in there.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > LAST
