"""Run the fast suite while every process of it is stopped at random for up to 2 s.

usage: python -m benchmarks.faults.random_stops [--runs N] [--seed N] [words for pytest]

A stop is what a busy machine does to a process. A test that fails by it expects something within a
time, or has a race; so does the product, perhaps. Prints a line for each run and exits with 1 if
one was red; the output of a run is in build/stops/.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

LONGEST_S = 2.0
LOOK_S = 0.05
EVERY_S = 5.0
"""Mean time between two stops of a process: it stands for a sixth of the time."""
FAST = ("-n", "2", "--dist", "loadscope", "-m", "not slow", "--ignore=tests/repo")


class Stopper:
    """Stops and continues the processes below one process."""

    def __init__(self, root: psutil.Process, rng: random.Random) -> None:
        self._root = root
        self._rng = rng
        self._until_s: dict[psutil.Process, float] = {}
        self.num_stops = 0

    def look(self) -> None:
        """Stop some processes, continue those whose time is over."""
        now_s = time.monotonic()
        for process in [p for p, until_s in self._until_s.items() if until_s <= now_s]:
            self._continue(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                if process not in self._until_s and self._rng.random() < LOOK_S / EVERY_S:
                    self._stop(process, now_s)

    def end(self) -> None:
        """Continue all that are stopped."""
        for process in list(self._until_s):
            self._continue(process)

    def _stop(self, process: psutil.Process, now_s: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            # A test may have stopped it on purpose, and would not expect it to continue.
            if process.status() != psutil.STATUS_STOPPED:
                process.send_signal(signal.SIGSTOP)
                self._until_s[process] = now_s + self._rng.uniform(0.0, LONGEST_S)
                self.num_stops += 1

    def _continue(self, process: psutil.Process) -> None:
        del self._until_s[process]
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def run_once(words: list[str], rng: random.Random, output: Path) -> tuple[int, int, list[str]]:
    """Return the exit code, the number of stops, and the tests that failed."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    with output.open("wb") as sink:
        suite = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
    stopper = Stopper(psutil.Process(suite.pid), rng)
    try:
        while suite.poll() is None:
            stopper.look()
            time.sleep(LOOK_S)
    finally:
        stopper.end()
        suite.terminate()
    lines = output.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return suite.wait(), stopper.num_stops, failed


def main() -> int:
    """Run, print, and return 1 if a run was red."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments, words = parser.parse_known_args()
    folder = Path("build", "stops")
    folder.mkdir(parents=True, exist_ok=True)
    num_red = 0
    for number in range(arguments.runs):
        rng = random.Random(arguments.seed + number)
        started_s = time.monotonic()
        code, num_stops, failed = run_once(words or [*FAST], rng, folder / f"run-{number}.txt")
        num_red += code != 0
        took_s = time.monotonic() - started_s
        sys.stdout.write(
            f"run {number}: exit code {code}, {num_stops} stops, {took_s:.0f} s\n"
            + "".join(f"    {line}\n" for line in failed)
        )
        sys.stdout.flush()
    sys.stdout.write(f"{num_red} of {arguments.runs} runs were red\n")
    return 1 if num_red else 0


if __name__ == "__main__":
    sys.exit(main())
