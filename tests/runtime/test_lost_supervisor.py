"""A process on another machine has no parent that the kernel could watch: it exits by itself once
the supervisor does not answer.
"""

import signal
import subprocess
from pathlib import Path

import pytest
from members import without_supervisor

from async_rl.core.os import RESTART_CODE
from async_rl.launchers.backends.local import child_command
from async_rl.planning.topology import ProcessSpec


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    without_supervisor(tmp_path, "verifiers.cells=1", "timeouts.call_s=0.2")
    verifier = ProcessSpec(name="verifier-0", role="verifier", rank=0, cores=(), gpus=0, env={})
    return child_command(verifier, tmp_path, parent_pid=0, announces=True)


def test_a_process_without_supervisor_exits_after_its_patience_to_be_started_again(
    command: list[str], tmp_path: Path
) -> None:
    assert subprocess.run(command, check=False, timeout=60).returncode == RESTART_CODE
    log = (tmp_path / "logs" / "verifier-0.log").read_text()
    assert "did not answer Heartbeat within 0.2 s, for 1.2 s" in log


def test_a_crash_in_native_code_leaves_what_each_thread_did(command: list[str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSEGV)
        output = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in output
    assert "runtime/main.py" in output
