from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES
from async_rl.sandbox.watch import Meter, open_proc

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cells_script.py")
SYSTEM_PYTHON = Path("/usr/bin/python3.11")
OWN = [sys.executable, str(SCRIPT), str(ROOT)]
# A process that collects orphans, as the init of a machine does.
COLLECTOR = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
subprocess.run(sys.argv[1:], check=True)
try: sys.exit(f'left: {os.waitpid(-1, 0)}')
except ChildProcessError: pass
"""


def _check(said: dict[str, Any], level: int) -> None:
    if said["level"] != level:
        pytest.skip(f"this machine has no level {level}: {said['reasons']}")
    assert said["square"] == "9"
    assert "Error" in said["passwd"]
    assert said["fork"] == said["signal"] == '"PermissionError: [Errno 1] Operation not permitted"'
    assert said["loop"] == 3
    assert said["memory"] == "0"
    assert said["import"] == "1"
    assert said["replaced"] == 0


def _said(command: list[str], **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        **options,
    )  # fmt: skip
    if "no jail works" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def ordinary() -> Iterator[list[str]]:
    """The script as an ordinary user: root first becomes `nobody`, with the system's Python.

    That user can read only a copy of the package.
    """
    if os.geteuid() != 0:
        yield OWN
        return
    if shutil.which("setpriv") is None or not SYSTEM_PYTHON.exists():
        pytest.skip("no setpriv or no system Python 3.11 to become another user with")
    place = Path("/var/tmp") / f"async_rl-jail-{os.getpid()}"
    shutil.copytree(
        ROOT / "sandbox", place / "sandbox", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(SCRIPT, place)
    try:
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
        yield [*become, str(SYSTEM_PYTHON), "-B", str(place / SCRIPT.name), str(place)]
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_ordinary_user_gets_the_same_jail(level: int, ordinary: list[str]) -> None:
    said = _said([*ordinary, str(level)], cwd="/")
    assert said["uid"] != 0
    _check(said, level)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_cells_die_with_a_server_that_is_killed(level: int) -> None:
    with subprocess.Popen(
        [*OWN, str(level), "stay"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        said = json.loads(server.stdout.readline())
        cells = [psutil.Process(pid) for pid in said["pids"]]
        family = [each for cell in cells for each in (cell, *cell.children(recursive=True))]
        server.send_signal(signal.SIGKILL)
        server.wait()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    _check(said, level)


def test_closing_a_pool_leaves_no_mount_and_no_process_to_init() -> None:
    mounts = Path("/proc/self/mounts").read_text()
    before = set(psutil.Process().children(recursive=True))
    _said([sys.executable, "-c", COLLECTOR, *OWN, str(NAMESPACES)])
    assert set(psutil.Process().children(recursive=True)) == before
    assert Path("/proc/self/mounts").read_text() == mounts


def test_a_task_that_a_signal_has_stopped_counts_as_asleep() -> None:
    """A program that stops itself would otherwise hold its cell for ten times its limit."""
    proc = open_proc()
    try:
        with subprocess.Popen(["/bin/sleep", "60"]) as process:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            meter = Meter(proc)
            meter.use([process.pid], 1.0)
            usage = meter.use([process.pid], 1.0)
            process.kill()
        assert usage.asleep_s == 1.0
    finally:
        os.close(proc)


def test_the_cpu_time_of_a_process_counts_although_its_tasks_exit_during_the_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proc = open_proc()

    def exited(*_: object) -> None:
        raise ProcessLookupError

    try:
        meter = Meter(proc)
        seen = meter.use([os.getpid()], 1.0)
        monkeypatch.setattr(meter, "progress", exited)
        unseen = meter.use([os.getpid()], 0.9)
    finally:
        os.close(proc)
    assert unseen.cpu_s >= seen.cpu_s > 0
    assert unseen.memory_bytes > 0
    assert unseen.asleep_s == pytest.approx(0.3)
