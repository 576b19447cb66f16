"""What was sent to a node does not outlive who it was sent with."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_rl.launchers.backends.node_directory import NodeDirectory, sweep

MAKER = """
import sys, time
from async_rl.launchers.backends.node_directory import NodeDirectory
made = NodeDirectory("run-generator-0")
made.write("keys/keys.json", b"secret")
print(made.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories are made, here and in children."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_gone_soon_after_its_maker_was_killed(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        path = Path(maker.stdout.readline().strip())
        assert path.parent == temporary
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((path / "keys" / "keys.json").stat().st_mode) == 0o600
        maker.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while path.exists():
        assert time.monotonic() < deadline_s
        os.sched_yield()


def test_what_nobody_holds_any_more_is_swept_and_what_is_held_or_another_s_stays(
    temporary: Path,
) -> None:
    held = NodeDirectory("run-verifier-0")
    left = temporary / "async_rl-run-generator-0-abc"
    being_made = temporary / "async_rl-run-generator-1-abc"
    others = temporary / "else"
    for path in (left, being_made, others):
        path.mkdir()
    for path in (left, others):
        (path / ".held").touch()
    sweep(temporary)
    assert {path.name for path in temporary.iterdir()} == {
        held.path.name,
        being_made.name,
        others.name,
    }
    held.remove()
    assert not held.path.exists()
