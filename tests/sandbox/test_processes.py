from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES
from async_rl.sandbox.watch import Meter, open_proc

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("cells_script.py")
SYSTEM_PYTHON = Path("/usr/bin/python3.11")


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


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_ordinary_user_gets_the_same_jail(level: int, tmp_path: Path) -> None:
    """As root it first becomes the user `nobody`, with the system's Python.

    That user can read only a copy of the package.
    """
    command, cwd = [sys.executable, str(SCRIPT), str(ROOT), str(level)], ROOT
    if os.geteuid() == 0:
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
            become = [
                "setpriv",
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "--inh-caps=-all",
            ]
            command, cwd = (
                [
                    *become,
                    str(SYSTEM_PYTHON),
                    "-B",
                    str(place / SCRIPT.name),
                    str(place),
                    str(level),
                ],
                place,
            )
            done = subprocess.run(
                command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            shutil.rmtree(place)
    else:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
    if "no jail works" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["uid"] != 0
    _check(said, level)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_cells_die_with_a_server_that_is_killed(level: int) -> None:
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(ROOT), str(level), "stay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout
    assert server.stdin
    said = json.loads(server.stdout.readline())
    family = [
        process
        for pid in said["pids"]
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdin.close()
    server.stdout.close()
    assert psutil.wait_procs(family, timeout=10)[1] == []
    _check(said, level)


def test_closing_a_pool_leaves_no_process_and_no_mount() -> None:
    mounts = Path("/proc/self/mounts").read_text()
    before = set(psutil.Process().children(recursive=True))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(ROOT), "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 10
    pids = json.loads(done.stdout)["pids"]
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert set(psutil.Process().children(recursive=True)) == before
    assert Path("/proc/self/mounts").read_text() == mounts


def test_closed_cells_leave_no_process_to_init() -> None:
    """A process that collects orphans, as the init of a machine does, gets none."""
    collector = (
        "import ctypes, os, subprocess, sys\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"  # PR_SET_CHILD_SUBREAPER
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "try:\n    sys.exit(f'left: {os.waitpid(-1, 0)}')\n"
        "except ChildProcessError:\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", collector, sys.executable, str(SCRIPT), str(ROOT), str(NAMESPACES)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "no jail works" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


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
