from __future__ import annotations

import json
import os
import signal
import socket
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

from async_rl.core.errors import InfrastructureError
from async_rl.monitoring.event_file import EventFile
from async_rl.monitoring.tensorboard_process import TensorBoard

_START_S = 60.0


def until(is_over: Callable[[], bool], *, limit_s: float = _START_S) -> None:
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


def open_board(run_dir: Path, *, port: int = 0) -> TensorBoard:
    return TensorBoard(
        run_dir,
        host="127.0.0.1",
        port=port,
        log=run_dir / "logs" / "tensorboard.log",
    )


def _gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_taken_port_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InfrastructureError,
            match=rf"127\.0\.0\.1:{port} \(monitoring\.tensorboard_port\).*0 for a free one",
        ):
            open_board(tmp_path, port=port)


@pytest.mark.covers("logger: tensorboard")
@pytest.mark.slow
def test_tensorboard_serves_the_run_on_loopback_and_leaves_nothing_behind(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "tensorboard")
    events.scalar("reward/mean", 0.5, 1)
    events.close()
    board = open_board(tmp_path)
    processes = _boards_of(os.getpid())
    try:
        base = board.url.partition("#")[0]
        assert board.url.startswith("http://127.0.0.1:")
        until(lambda: b"TensorBoard" in fetch(base))
        until(lambda: tmp_path.name in json.loads(fetch(f"{base}data/runs") or "[]"))
        curve = f"{base}data/plugin/scalars/scalars?run={tmp_path.name}&tag=reward/mean"
        ((_, step, value),) = json.loads(fetch(curve))
        assert (step, value) == (1, 0.5)
        listening = {
            c.laddr.ip
            for p in processes
            for c in p.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        # Other users of the machine see ports and command lines, and no page.
        secret = urllib.parse.urlsplit(board.url).path.strip("/")
        assert len(secret) > 40
        for p in processes:
            assert not any(secret in word for word in p.cmdline())
            for c in p.net_connections("tcp"):
                for path in ("", "data/runs", "data/environment", "x/data/runs"):
                    address = f"http://127.0.0.1:{c.laddr.port}/{path}"
                    with pytest.raises(urllib.error.HTTPError, match="404"):
                        urllib.request.urlopen(address, timeout=10)
        assert processes
    finally:
        board.close()
    until(lambda: all(map(_gone, processes)), limit_s=10)


@pytest.mark.slow
def test_tensorboard_dies_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, signal; from pathlib import Path; from"
        " async_rl.monitoring.tensorboard_process import TensorBoard\nboard ="
        f" TensorBoard(Path({str(tmp_path)!r}), host='127.0.0.1',"
        f" port=0, log=Path({str(tmp_path / 'log')!r}))\n"
        "sys.stdout.write(f'{board.url}\\n'); sys.stdout.flush();"
        " signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        until(lambda: bool(fetch(url.partition("#")[0])))
        processes = _boards_of(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
    assert processes
    until(lambda: all(map(_gone, processes)), limit_s=10)


def _boards_of(pid: int) -> list[psutil.Process]:
    """Each TensorBoard that this process started, with its children."""
    children = psutil.Process(pid).children()
    boards = [p for p in children if any("tensorboard_process" in word for word in p.cmdline())]
    return [p for board in boards for p in (board, *board.children(recursive=True))]
