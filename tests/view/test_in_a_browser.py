"""The web view in headless Chromium: pages are drawn without a violation of their policy."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    " --disable-background-networking --disable-component-update --enable-logging=stderr"
    " --virtual-time-budget=1000"
)


@pytest.fixture(scope="module")
def address(directory: Path) -> Iterator[str]:
    """The real command, until Ctrl-C."""
    command = [sys.executable, "-m", "async_rl.launchers.cli", "view", str(directory / "one")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/runs/one\?token=\S+", line)
    assert found, line
    yield found[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    process.stdout.close()


def drawn(address: str, profile: Path) -> tuple[str, str]:
    """Return (the page as the browser holds it after its script ran, what the browser reports)."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_pages_are_drawn_and_keep_to_their_policy(address: str, tmp_path: Path) -> None:
    root, token = address.split("/runs/one?")
    # Each start of the browser forgets the cookie.
    for page in ("runs/one/groups/1?", "curves?run=one&run=two&"):
        dom, reports = drawn(f"{root}/{page}{token}", tmp_path)
        assert "</main>" in dom
        assert "Content Security Policy" not in reports, reports
        assert "Uncaught" not in reports, reports
    assert dom.count("<polyline") >= 2
