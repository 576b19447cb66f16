import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from async_rl.monitoring.event_file import EventFile

PARENT = """
import sys
from pathlib import Path
from async_rl.monitoring.tensorboard_process import TensorBoard
run = Path(sys.argv[1])
board = TensorBoard(run, host="127.0.0.1", port=0, log=run / "logs" / "tensorboard.log")
print(board.url, flush=True)
sys.stdin.readline()
"""


def until(is_over: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    """Wait for another process, which reports nothing when it is ready or gone."""
    deadline_s = time.monotonic() + limit_s
    while not is_over():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def fetch(url: str) -> bytes:
    """Return the page; empty until the server listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            content: bytes = reply.read()
            return content
    except OSError:
        return b""


@pytest.mark.covers("logger: tensorboard")
@pytest.mark.slow
def test_tensorboard_serves_on_loopback_and_ends_with_its_run_even_by_kill_9(
    tmp_path: Path,
) -> None:
    events = EventFile(tmp_path / "tensorboard")
    events.scalar("reward/mean", 0.5, 1)
    events.close()
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as parent:  # type: ignore[call-overload]
        base = parent.stdout.readline().strip().partition("#")[0]
        until(lambda: b"TensorBoard" in fetch(base))
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert processes
        check_pages(base, tmp_path.name, processes)
        parent.kill()
        until(lambda: all(map(_gone, processes)), limit_s=10)


def check_pages(base: str, run: str, processes: list[psutil.Process]) -> None:
    assert base.startswith("http://127.0.0.1:")
    until(lambda: run in json.loads(fetch(f"{base}data/runs") or "[]"))
    curve = f"{base}data/plugin/scalars/scalars?run={run}&tag=reward/mean"
    ((_, step, value),) = json.loads(fetch(curve))
    assert (step, value) == (1, 0.5)
    # Other users of the machine see ports and command lines, and no page.
    secret = urllib.parse.urlsplit(base).path.strip("/")
    assert len(secret) > 40
    for p in processes:
        assert not any(secret in word for word in p.cmdline())
        for c in p.net_connections("tcp"):
            assert c.laddr.ip == "127.0.0.1"
            for path in ("", "data/runs", "data/environment", "x/data/runs"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(f"http://127.0.0.1:{c.laddr.port}/{path}", timeout=10)


def _gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
