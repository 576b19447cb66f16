"""Do to a real run what can go wrong, for as long as you like, and audit what is left of it.

Faults: kill -9 and SIGSTOP of every process (the supervisor too), all processes at once, files
damaged between two lives, an output that nobody reads, a second resume of the live run, strangers
at every listener, and with --remote a reward server that answers errors and garbage.

The audit reads SQLite and metrics.jsonl by itself and shares no code with `async-rl ledger`.

Run: `python -m benchmarks.chaos --minutes 30 --conf ppo_code --ranks 2 [key=value ...]`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.server
import json
import math
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import figure

SETTINGS = (
    "generation.engine=hf",
    "buffer.groups_per_step=4",
    "generation.group_size=4",
    "generation.max_attempts=20",
    "generators.count=2",
    "evaluation.every_steps=10",
    "evaluation.num_prompts=8",
    "checkpoint.every_steps=3",
    "supervisor.max_restarts=1000",
    "timeouts.call_s=4",
    "monitoring.tensorboard_port=null",
)
NO_PROGRESS_S = 300.0
PAUSE_S = 20.0
LAST_STEPS = 5
COMMAND = str(Path(sys.executable).with_name("async-rl"))


class Run:
    """The run under attack, across its lives."""

    def __init__(self, directory: Path, settings: list[str], rng: random.Random) -> None:
        self.run_dir = directory / "run"
        self._rng = rng
        self.process = self._start(
            "launch", *settings, f"output_dir={directory}", "run_name=run", "num_steps=1000000"
        )

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        # Half of the lives lose their output at a random moment; the others are read to the end.
        is_closed = self._rng.random() < 0.5
        reader = threading.Thread(target=_read, args=(process.stdout, is_closed), daemon=True)
        reader.start()
        return process

    def resume(self, *settings: str) -> None:
        """Continue in a new life."""
        self.process = self._start("resume", str(self.run_dir), *settings)

    def children(self) -> dict[str, psutil.Process]:
        """Return the run's processes by name."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                words = child.cmdline()
                if "--name" in words:
                    found[words[words.index("--name") + 1]] = child
        return found

    def num_commits(self) -> int:
        """Return the steps that were ever committed, undone ones included."""
        with contextlib.suppress(sqlite3.Error), _reading(self.run_dir) as store:
            return int(store.execute("SELECT count(*) FROM steps").fetchone()[0])
        return 0

    def until_progress(self, since: int) -> bool:
        """Wait for a step after `since` commits; False if the run ends or does not progress."""
        deadline_s = time.monotonic() + NO_PROGRESS_S
        while self.num_commits() <= since:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)
        return True

    def crash(self) -> None:
        """Kill everything at once; the kernel ends the children with the supervisor."""
        children = list(self.children().values())
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"outlived the supervisor: {alive}"


def _read(output: Any, is_closed: bool) -> None:
    for number, _ in enumerate(output):
        if is_closed and number > 20:
            break
    output.close()


@contextlib.contextmanager
def _reading(run_dir: Path) -> Iterator[sqlite3.Connection]:
    path = run_dir / "store.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)) as store:
        yield store


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
            "strangers": self._strangers,
        }

    def _kill_one(self) -> bool:
        children = list(self._run.children().values())
        return bool(children) and _send(self._rng.choice(children), signal.SIGKILL)

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
            self.problems.append(f"a pause of the supervisor ended {', '.join(lost)}")
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


def audit(run_dir: Path, *, groups_per_step: int, max_staleness: int) -> Iterator[str]:
    """Yield a sentence for each broken promise, from SQL and metrics.jsonl alone."""
    with _reading(run_dir) as store:
        if store.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            yield "the store is damaged"
        versions = [v for (v,) in store.execute("SELECT version FROM steps WHERE undone_s IS NULL")]
        if sorted(versions) != list(range(1, len(versions) + 1)):
            yield f"the surviving steps are {sorted(versions)}"
        trained: dict[int, list[int]] = collections.defaultdict(list)
        rows = store.execute(
            "SELECT s.version, t.group_id, g.state, g.oldest_version FROM steps s JOIN trained t"
            " USING (step_id) JOIN groups g USING (group_id) WHERE s.undone_s IS NULL"
        ).fetchall()
        for version, group_id, state, oldest in rows:
            trained[group_id].append(version)
            if state != "trained":
                yield f"group {group_id} was trained by step {version} and is {state}"
            if oldest is not None and version - 1 - oldest > max_staleness:
                yield f"step {version} trained group {group_id} with tokens of version {oldest}"
        for group_id, steps in trained.items():
            if len(steps) > 1:
                yield f"group {group_id} was trained by the steps {steps}"
        sizes = collections.Counter(version for version, *_ in rows)
        for version in versions:
            if sizes[version] != groups_per_step:
                yield f"step {version} trained {sizes[version]} groups"
        states = dict(store.execute("SELECT group_id, state FROM groups"))
        for group_id, state in states.items():
            if state == "trained" and group_id not in trained:
                yield f"group {group_id} is trained by no surviving step"
        positions = [
            p for (p,) in store.execute("SELECT position FROM groups WHERE purpose='train'")
        ]
        if set(positions) != set(range(len(set(positions)))):
            yield "positions in the order of prompts are missing"
        nameless = "SELECT count(*) FROM groups WHERE state='dropped' AND reason=''"
        if store.execute(nameless).fetchone()[0]:
            yield "groups were dropped without a reason"
    yield from _audit_metrics(run_dir, len(versions), max_staleness)


def _audit_metrics(run_dir: Path, num_steps: int, max_staleness: int) -> Iterator[str]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["step"] > 0]
    if steps != list(range(1, num_steps + 1)):
        yield f"metrics.jsonl has {len(steps)} steps, the store {num_steps}"
    for row in rows:
        if row.get("staleness/max_versions", 0) > max_staleness:
            yield f"step {row['step']} reports a staleness of {row['staleness/max_versions']}"
        loss = row.get("loss/policy", 0.0)
        if loss is None or not math.isfinite(loss):
            yield f"step {row['step']} has the loss {loss}"


def leftovers(run_dir: Path) -> list[str]:
    """Return the processes that still name the run."""
    return [
        f"process {process.pid}"
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid() and str(run_dir) in " ".join(process.info["cmdline"] or [])
    ]


def attack(arguments: argparse.Namespace, directory: Path, settings: list[str]) -> list[str]:
    """Run until the time or the number of faults is over; return what is wrong."""
    rng = random.Random(arguments.seed)
    run = Run(directory, settings, rng)
    chaos = Chaos(run, rng)
    counts: collections.Counter[str] = collections.Counter()
    started_s = time.monotonic()
    try:
        if not run.until_progress(0):
            return ["the run did not start"]
        names = list(chaos.faults())
        while time.monotonic() - started_s < 60 * arguments.minutes:
            # Every fault in turn first, then at random.
            number = counts.total()
            name = names[number] if number < len(names) else rng.choice(names)
            time.sleep(rng.uniform(0.5, 5))
            before = run.num_commits()
            if chaos.faults()[name]():
                counts[name] += 1
            print(f"{time.strftime('%H:%M:%S')}  {name}, after {before} commits", flush=True)
            if not run.until_progress(before):
                return [*chaos.problems, f"no progress after: {name} (see {run.run_dir}/logs)"]
        # The end has to be reached by a resume, as everything else.
        run.crash()
        with _reading(run.run_dir) as store:
            query = "SELECT max(version) FROM steps WHERE undone_s IS NULL"
            last = store.execute(query).fetchone()[0] + LAST_STEPS
        run.resume(f"num_steps={last}")
        code = run.process.wait(NO_PROGRESS_S)
        problems = [*chaos.problems]
        if code != 0:
            problems.append(f"the run ended with exit code {code}")
        problems += audit(run.run_dir, groups_per_step=4, max_staleness=arguments.max_staleness)
        figure("faults", counts.total(), "")
        figure("steps of the surviving history", last, "")
        figure("minutes", (time.monotonic() - started_s) / 60, "min")
        return problems + leftovers(run.run_dir)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


def main() -> None:
    """Attack one run of each configuration; exit 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--conf", action="append", help="default: grpo_code, then ppo_code")
    parser.add_argument("--ranks", type=int, default=2, help="of the learner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--remote", action="store_true", help="rewards of a server that fails")
    parser.add_argument("--keep", action="store_true", help="keep the run's directory")
    parser.add_argument("settings", nargs="*")
    arguments = parser.parse_args()
    problems = []
    for conf in arguments.conf or ["grpo_code", "ppo_code"]:
        directory = Path(tempfile.mkdtemp(prefix=f"chaos-{conf}-"))
        with reward_server() as url:
            settings = [f"conf={conf}", *SETTINGS, f"learner.ranks={arguments.ranks}"]
            settings.append(f"buffer.max_staleness_versions={arguments.max_staleness}")
            if arguments.remote:
                settings += ["reward.fn=remote", f"reward.remote.url={url}"]
            found = attack(arguments, directory, [*settings, *arguments.settings])
        figure(f"{conf}, {arguments.ranks} ranks: broken promises", len(found), "", goal="0")
        for problem in found:
            print(f"  {problem}")
        if found or arguments.keep:
            print(f"  kept: {directory}")
        else:
            subprocess.run(["rm", "-r", str(directory)], check=True)
        problems += found
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
