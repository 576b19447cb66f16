"""Kills the processes of a real run again and again while it trains, and says what became of it:
`python tests/e2e/chaos.py --kills 24`.

Faults: kill -9 of each role at a random moment; kill -9 of the learner while it writes a checkpoint
and of a generator while new weights are on their way to it; SIGSTOP of a generator for longer than
its deadline; kill -9 of the supervisor, after which the run is resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e_support import LiveRun, shared_memory

SETTINGS = (
    "generators.count=2",
    "generation.max_attempts=20",
    "checkpoint.every_steps=3",
    "timeouts.start_s=60",
    "timeouts.call_s=2",
    "supervisor.max_restarts=1000",
)
ORDER = (
    "generator",
    "learner in a checkpoint",
    "verifier",
    "buffer",
    "generator in a push",
    "supervisor",
    "stopped generator",
    "learner",
)
"""Each fault once, in an order in which everything has been up for a while before the next."""

_MOST_WAIT_S = 240.0
_LOOK_S = 0.002
"""For moments that pass quickly. Elsewhere 0.1: polling would take a core from the run."""


@dataclass
class Summary:
    """What was done to the run, and what became of it."""

    kills: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    exit_code: int = -1
    steps: list[int] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    num_steps: int = 0
    num_undone_steps: int = 0
    num_groups: int = 0
    problems: list[str] = field(default_factory=list)
    left_running: list[str] = field(default_factory=list)
    left_in_shared_memory: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kills = ", ".join(f"{number} x {fault}" for fault, number in self.kills.items())
        curve = ", ".join(f"{step}: {value:.2f}" for step, value in self.evaluations.items())
        return "\n".join(
            [
                f"faults            {self.kills.total()}: {kills}",
                f"exit code         {self.exit_code} after {self.wall_s:.0f} s",
                (
                    f"steps             {self.num_steps} in the surviving history,"
                    f" {self.num_undone_steps} undone"
                ),
                f"groups            {self.num_groups}",
                f"held-out pass@1   {curve}",
                f"ledger audit      {'clean' if not self.problems else self.problems}",
                f"left running      {self.left_running or 'nothing'}",
                f"left in /dev/shm  {self.left_in_shared_memory or 'nothing'}",
            ]
        )


class Chaos:
    """One run and its misfortunes."""

    def __init__(self, output_dir: Path, settings: Sequence[str], *, seed: int) -> None:
        self._output_dir = output_dir
        self._rng = random.Random(seed)
        self._before = shared_memory()
        self._started_s = time.monotonic()
        self.run = LiveRun(output_dir, *SETTINGS, *settings)
        self.summary = Summary()

    def strike(self, fault: str) -> bool:
        """Does one thing to the run and waits until it gets on again; False if the run ended
        before.
        """
        if not self._until(lambda: True, wait_s=self._rng.uniform(0.5, 2.0), look_s=0.1):
            return False
        step = self._committed()
        if not self._faults()[fault]():
            return False
        self.summary.kills[fault] += 1
        return self._until(lambda: self._committed() != step, wait_s=0, look_s=0.1)

    def _faults(self) -> dict[str, Callable[[], bool]]:
        generator = f"generator-{self._rng.randrange(2)}"
        return {
            "generator": lambda: self._kill(generator),
            "verifier": lambda: self._kill("verifier-0"),
            "buffer": lambda: self._kill("buffer"),
            "learner": lambda: self._kill("learner-0"),
            "learner in a checkpoint": lambda: (
                self._when(self._writes_checkpoint) and self._kill("learner-0")
            ),
            "generator in a push": lambda: (
                self._when(self._has_stepped()) and self._kill(generator)
            ),
            "stopped generator": lambda: self._kill(generator, signal.SIGSTOP),
            "supervisor": self._resume,
        }

    def finish(self, *, timeout_s: float) -> Summary:
        """Waits for the end of the run and looks at what it left."""
        summary = self.summary
        summary.exit_code = self.run.wait(timeout_s=timeout_s)
        summary.wall_s = time.monotonic() - self._started_s
        summary.steps = [int(row["step"]) for row in self.run.rows]
        summary.evaluations = {
            int(row["step"]): row["eval/pass_at_1"]
            for row in self.run.rows
            if "eval/pass_at_1" in row
        }
        found = self.run.audit()
        summary.num_steps, summary.num_undone_steps = found["num_steps"], found["num_undone_steps"]
        summary.num_groups, summary.problems = found["num_groups"], found["problems"]
        summary.left_running = [str(process) for process in self.run.processes()]
        summary.left_in_shared_memory = sorted(shared_memory() - self._before)
        return summary

    def _kill(self, process: str, number: signal.Signals = signal.SIGKILL) -> bool:
        """Kills it as soon as it runs (it may be between two lives)."""
        return self._until(lambda: self._is_sent(process, number), wait_s=0, look_s=0.1)

    def _is_sent(self, process: str, number: signal.Signals) -> bool:
        try:
            self.run.kill(process, number)
        except (AssertionError, ProcessLookupError):
            return False
        return True

    def wind_up(self, more_steps: int) -> int:
        """Kills the supervisor too; the run that is resumed ends this many steps after the last
        one: its number of steps.
        """
        num_steps = self.run.step + more_steps
        assert self._resume(f"num_steps={num_steps}")
        self.summary.kills["supervisor"] += 1
        return num_steps

    def _resume(self, *settings: str) -> bool:
        if self.run.process.poll() is not None:
            return False
        self.run.kill_all()
        self.run = LiveRun(self._output_dir, *settings, resumes=True)
        return True

    def _when(self, condition: Callable[[], bool]) -> bool:
        return self._until(condition, wait_s=0)

    def _until(
        self, condition: Callable[[], bool], *, wait_s: float, look_s: float = _LOOK_S
    ) -> bool:
        """Wait for wait_s and the condition; False if the run ends first, an error if it hangs."""
        started_s = time.monotonic()
        while time.monotonic() < started_s + wait_s or not condition():
            if self.run.process.poll() is not None:
                return False
            assert time.monotonic() < started_s + wait_s + _MOST_WAIT_S, (
                f"the run does not get on:\n{self.run.terminal}\n{self.run.status()}"
            )
            time.sleep(look_s)
        return True

    def _writes_checkpoint(self) -> bool:
        return any((self.run.run_dir / "checkpoints").glob("*.partial"))

    def _has_stepped(self) -> Callable[[], bool]:
        """True from the next commit on: the new weights are published right after it."""
        before = self._committed()
        return lambda: self._committed() != before

    def _committed(self) -> int:
        """Steps ever committed, undone ones included."""
        with contextlib.closing(
            sqlite3.connect(self.run.run_dir / "store.sqlite", timeout=5)
        ) as connection:
            try:
                return int(connection.execute("SELECT count(*) FROM steps").fetchone()[0])
            except sqlite3.OperationalError:  # it has no tables yet
                return 0


def main() -> int:
    """0 if the run came through."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "settings", nargs="*", default=["conf=grpo_code", "generation.engine=hf", "num_steps=60"]
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        chaos = Chaos(Path(directory), arguments.settings, seed=arguments.seed)
        try:
            chaos.run.until(lambda: chaos.run.step >= 1, "step 1")
            for number in range(arguments.kills):
                fault = ORDER[number % len(ORDER)]
                is_going = chaos.strike(fault)
                sys.stdout.write(
                    f"{time.strftime('%H:%M:%S')}  {fault}, at step {chaos.run.step}\n"
                )
                sys.stdout.flush()
                if not is_going:
                    break
            summary = chaos.finish(timeout_s=1200)
        finally:
            chaos.run.end()
    sys.stdout.write(f"{summary}\n")
    is_whole = (
        summary.exit_code == 0
        and not summary.problems
        and not summary.left_running
        and not summary.left_in_shared_memory
    )
    return 0 if is_whole and summary.kills.total() >= arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
