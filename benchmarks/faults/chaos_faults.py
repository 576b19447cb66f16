"""The faults of benchmarks.faults.chaos: possible failures around a run."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from async_rl.runs.control import MARK
from benchmarks.faults.chaos_run import COMMAND, Run

PAUSE_S = 20.0
KILL_WORKER = "kill a worker of environments"


class Chaos:
    """The faults, each a method that returns whether it could be done."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self.problems: list[str] = []

    def faults(self) -> dict[str, Callable[[], bool]]:
        """Return the faults by name."""
        return {
            "kill one": self._kill_one,
            "stop one": self._stop_one,
            "kill all children": self._kill_all,
            "stop the supervisor": self._stop_supervisor,
            "crash of everything": self._crash,
            "crash and a damaged file": self._damage,
            "second resume": self._second_resume,
            "second resume, wrong mark": self._second_resume_with_wrong_mark,
            "strangers": self._strangers,
            KILL_WORKER: self._kill_worker,
        }

    def _kill_one(self) -> bool:
        children = list(self._run.children().values())
        return bool(children) and _send(self._rng.choice(children), signal.SIGKILL)

    def kill(self, role: str) -> bool:
        """Kill one process of a role; the workers of environments count as one."""
        if role == KILL_WORKER:
            return self._kill_worker()
        children = self._run.children().items()
        found = [child for name, child in children if name.startswith(role)]
        return bool(found) and _send(self._rng.choice(found), signal.SIGKILL)

    def _kill_worker(self) -> bool:
        workers = self._run.workers()
        return bool(workers) and _send(self._rng.choice(workers), signal.SIGKILL)

    def _kill_all(self) -> bool:
        children = self._run.children().values()
        return any([_send(child, signal.SIGKILL) for child in children])

    def _stop_one(self) -> bool:
        children = list(self._run.children().values())
        if not children:
            return False
        child = self._rng.choice(children)
        is_stopped = _send(child, signal.SIGSTOP)
        time.sleep(self._rng.uniform(1, PAUSE_S))
        _send(child, signal.SIGCONT)
        return is_stopped

    def _stop_supervisor(self) -> bool:
        before = {name: child.pid for name, child in self._run.children().items()}
        supervisor = psutil.Process(self._run.process.pid)
        _send(supervisor, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        _send(supervisor, signal.SIGCONT)
        time.sleep(5)
        lost = [
            name
            for name, child in self._run.children().items()
            if before.get(name, child.pid) != child.pid
        ]
        if lost:
            self.problems.append(f"a pause of the supervisor restarted {', '.join(lost)}")
        return True

    def _crash(self) -> bool:
        self._run.crash()
        self._run.resume()
        return True

    def _damage(self) -> bool:
        self._run.crash()
        run_dir = self._run.run_dir
        checkpoints = sorted((run_dir / "checkpoints").glob("step_[0-9]*"))
        parts = [path for path in checkpoints[-1:] for path in path.rglob("*") if path.is_file()]
        # The only checkpoint is not damaged: nothing could replace it.
        if len(checkpoints) > 1 and parts:
            path = self._rng.choice(parts)
            data = bytearray(path.read_bytes())
            if self._rng.random() < 0.5 and data:
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
            else:
                del data[len(data) // 2 :]
            path.write_bytes(data)
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 1, "half a ro')
        self._run.resume()
        return True

    def _second_resume(self) -> bool:
        done = subprocess.run(
            [COMMAND, "resume", str(self._run.run_dir)], capture_output=True, check=False
        )
        if done.returncode != 2:
            self.problems.append(f"a second resume of the live run exited {done.returncode}")
        return True

    def _second_resume_with_wrong_mark(self) -> bool:
        """As after a change of the clock: the mark names another process, and the lock decides."""
        mark = self._run.run_dir / MARK
        before = mark.read_bytes()
        fields = json.loads(before)
        fields["start_ticks"] += self._rng.choice([-500, 500])
        mark.write_text(json.dumps(fields))
        self._second_resume()
        if json.loads(mark.read_bytes()) != fields:
            self.problems.append("a second resume replaced the mark of the live run")
        mark.write_bytes(before)
        return True

    def _strangers(self) -> bool:
        opened = []
        for process in [psutil.Process(self._run.process.pid), *self._run.children().values()]:
            with contextlib.suppress(psutil.Error):
                for end in process.net_connections("tcp"):
                    if end.status == psutil.CONN_LISTEN:
                        opened += [_garbage(tuple(end.laddr), self._rng) for _ in range(50)]
        time.sleep(2)
        for stranger in opened:
            stranger.close()
        return bool(opened)


def _send(process: psutil.Process, number: signal.Signals) -> bool:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False


def _garbage(address: tuple[Any, ...], rng: random.Random) -> socket.socket:
    stranger = socket.socket()
    stranger.settimeout(0.01)
    with contextlib.suppress(OSError):
        stranger.connect(address[:2])
        stranger.send(rng.randbytes(rng.randrange(1, 500)))
    return stranger


class _Reward(http.server.BaseHTTPRequestHandler):
    """A reward server that fails half of the time, and for a whole minute now and then."""

    def do_POST(self) -> None:  # the name that http.server calls
        self.rfile.read(int(self.headers["content-length"]))
        is_down = time.time() % 240 > 200
        answers = [(500, b"error"), (200, b"NaN"), (200, b"{"), (200, b"")]
        status, body = (200, b"1.0") if random.random() < 0.5 else random.choice(answers)
        if is_down:
            status, body = 500, b"down"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def reward_server() -> Iterator[str]:
    """Serve on a free port of loopback and yield the URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Reward) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
