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
from typing import Any

import psutil
import pytest
from composing import compose

from async_rl.core.errors import InfrastructureError
from async_rl.monitoring.event_file import EventFile
from async_rl.monitoring.tensorboard_process import TensorBoard

_START_S = 60.0
_EVERY_RUN = urllib.parse.quote(
    '{"startIndex": 0, "sliceSize": 9, "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_RUNNING"]}'
)


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


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
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
    changes = ["seed=3", "data.shuffle=true", "run_name=first"]
    events.describe_run(compose("ppo_code", changes))
    events.scalar("reward/mean", 0.5, 1)
    events.close()
    board = open_board(tmp_path)
    groups: list[dict[str, Any]] = []

    def has_read_the_run() -> bool:
        page = fetch(f"{base}data/plugin/hparams/session_groups?request={_EVERY_RUN}")
        groups[:] = json.loads(page or '{"sessionGroups": []}')["sessionGroups"]
        return bool(groups)

    try:
        base = board.url.partition("#")[0]
        assert board.url.startswith("http://127.0.0.1:")
        until(lambda: b"TensorBoard" in fetch(base))
        until(has_read_the_run)
        (group,) = groups
        assert group["sessions"][0]["name"] == tmp_path.name
        shown = {name: group["hparams"][name] for name in ("seed", "data.shuffle", "run_name")}
        assert shown == {"seed": 3, "data.shuffle": True, "run_name": "first"}
        assert [(m["name"]["tag"], m["value"]) for m in group["metricValues"]] == [
            ("reward/mean", 0.5)
        ]
        listening = {
            c.laddr.ip
            for p in _family(board.pid)
            for c in p.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        # Other users of the machine see ports and command lines, and no page.
        secret = urllib.parse.urlsplit(board.url).path.strip("/")
        assert len(secret) > 40
        for p in _family(board.pid):
            assert not any(secret in word for word in p.cmdline())
            for c in p.net_connections("tcp"):
                for path in ("", "data/runs", "data/environment", "x/data/runs"):
                    address = f"http://127.0.0.1:{c.laddr.port}/{path}"
                    with pytest.raises(urllib.error.HTTPError, match="404"):
                        urllib.request.urlopen(address, timeout=10)
        assert board.is_running
        family = [p.pid for p in _family(board.pid)]
    finally:
        board.close()
    assert not board.is_running
    until(lambda: all(map(_gone, family)), limit_s=10)


@pytest.mark.slow
def test_tensorboard_dies_with_a_killed_parent(tmp_path: Path) -> None:
    script = (
        "import sys, signal; from pathlib import Path; from"
        " async_rl.monitoring.tensorboard_process import TensorBoard\nboard ="
        f" TensorBoard(Path({str(tmp_path)!r}), host='127.0.0.1',"
        f" port=0, log=Path({str(tmp_path / 'log')!r}))\n"
        "sys.stdout.write(f'{board.pid} {board.url}\\n'); sys.stdout.flush();"
        " signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        until(lambda: bool(fetch(url.partition("#")[0])))
        family = [p.pid for p in _family(int(pid))]
        os.kill(parent.pid, signal.SIGKILL)
    until(lambda: all(map(_gone, family)), limit_s=10)


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]
