"""Control a real run from a benchmark: start, read metrics, stop, continue, end."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from async_rl.composition.overrides import with_defaults

START_S = 240
_ALWAYS = (
    "evaluation.every_steps=0",
    "checkpoint.every_steps=0",
    "monitoring.tensorboard_port=null",
    "timeouts.call_s=2",
)


class LiveRun:
    """`async-rl launch` in a directory that is deleted afterwards."""

    def __init__(self, scratch: str, settings: list[str]) -> None:
        self.run_dir = Path(scratch) / "run"
        command = [
            str(Path(sys.executable).with_name("async-rl")),
            "launch",
            f"output_dir={scratch}",
            "run_name=run",
            *with_defaults(settings, _ALWAYS),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.go_on()
        self._process.terminate()
        self._process.wait(60)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that the run has recorded so far."""
        try:
            return [
                json.loads(line)
                for line in (self.run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
            ]
        except OSError:
            return []

    def step(self) -> int:
        """Return the newest recorded step; -1 before the first."""
        found = self.rows()
        return int(found[-1]["step"]) if found else -1

    def wait_for(self, step: int, timeout_s: float = START_S) -> None:
        """Return once the step is recorded."""
        deadline_s = time.monotonic() + timeout_s
        while self.step() < step:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the run did not reach step {step}; see {self.run_dir}/logs")
            time.sleep(0.05)

    def hold(self) -> None:
        """Stop every process of the run.

        The supervisor is stopped first, so that it reports no other process as late.
        """
        self._signal(self._all(), signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue every process, the supervisor last. Does nothing if the run has exited."""
        if self._process.poll() is not None:
            return
        self._signal(reversed(self._all()), signal.SIGCONT)

    @staticmethod
    def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # a judged program may have exited
                process.send_signal(number)

    def _all(self) -> list[psutil.Process]:
        supervisor = psutil.Process(self._process.pid)
        return [supervisor, *supervisor.children(recursive=True)]
