"""The run that benchmarks.faults.chaos attacks, across its lives."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.chaos_audit import reading

NO_PROGRESS_S = 300.0
WORKER = "async_rl.rollouts.agent_worker"
COMMAND = str(Path(sys.executable).with_name("async-rl"))


class Run:
    """The run under attack, across its lives."""

    def __init__(self, directory: Path, settings: list[str], rng: random.Random) -> None:
        self.run_dir = directory / "run"
        self._rng = rng
        self.last_line = ""
        self.process = self._start("launch", *settings, f"output_dir={directory}", "run_name=run")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        # Half of the lives lose their output at a random moment; other commands are read to the
        # end.
        is_closed = self._rng.random() < 0.5
        reader = threading.Thread(target=self._read, args=(process.stdout, is_closed), daemon=True)
        reader.start()
        return process

    def _read(self, output: Any, is_closed: bool) -> None:
        for number, line in enumerate(output):
            self.last_line = line.decode(errors="replace").strip() or self.last_line
            if is_closed and number > 20:
                break
        output.close()

    def resume(self, *settings: str) -> None:
        """Continue in a new life."""
        self.process = self._start("resume", str(self.run_dir), *settings)

    def children(self) -> dict[str, psutil.Process]:
        """Return the run's processes by name."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                # A process that has exited has no words.
                start = (child.cmdline() or [""])[-1]
                if start.startswith("{"):
                    found[json.loads(start)["spec"]["name"]] = child
        return found

    def workers(self) -> list[psutil.Process]:
        """Return the processes that run environments of agents: children of the gateways."""
        found = []
        for name, child in self.children().items():
            if name.startswith("gateway"):
                with contextlib.suppress(psutil.Error):
                    found += [p for p in child.children() if WORKER in p.cmdline()]
        return found

    def num_commits(self) -> int:
        """Return the steps that were ever committed, undone ones included."""
        with contextlib.suppress(sqlite3.Error), reading(self.run_dir) as store:
            return int(store.execute("SELECT count(*) FROM steps").fetchone()[0])
        return 0

    def until_progress(self, since: int) -> bool:
        """Wait for a step after `since` commits; False if the run exits or does not progress."""
        deadline_s = time.monotonic() + NO_PROGRESS_S
        while self.num_commits() <= since:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)
        return True

    def crash(self) -> None:
        """Kill the supervisor; the kernel kills its children with it."""
        children = list(self.children().values())
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"outlived the supervisor: {alive}"
