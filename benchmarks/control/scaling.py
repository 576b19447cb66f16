"""Measure a run that trains while its number of generators changes to 1, 3, 1 and 2.

The figures are the longest time without a learner step, and the time until a new generator has
work. They come from the store, which records when each step was committed and each group was handed
out, and from the log of the supervisor. The duration of steps varies anyway, so the longest time
without a step is compared with the longest time of the same run with one generator. On two cores a
starting engine shares the core of a generating engine; with separate cores it does not.

Run: `python -m benchmarks.control.scaling [--engine hf]`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from benchmarks.control.live_run import START_S, LiveRun
from benchmarks.figures import figure

WARM_UP_STEPS, ALONE_STEPS, MORE_STEPS = 6, 25, 6
SETTINGS = ["conf=grpo_code", "num_steps=100000", "weights.probe_every_pushes=0"]


def supervisor_said(run: LiveRun, sentence: str) -> list[float]:
    """Return the Unix times of the lines in the supervisor's log whose end matches the pattern."""
    lines = (run.run_dir / "logs" / "supervisor.log").read_text().splitlines()
    return [
        datetime.fromisoformat(" ".join(line.split()[:2])).timestamp()
        for line in lines
        if re.search(f" {sentence}", line)
    ]


def has_said(run: LiveRun, sentence: str, times: int) -> bool:
    """Return whether the supervisor's log has this number of such lines."""
    return len(supervisor_said(run, sentence)) == times


def until(condition: Callable[[], bool]) -> None:
    """Return once the condition is true."""
    deadline_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("the run did not reach the expected state in time")
        time.sleep(0.1)


def scale(run: LiveRun, generators: int) -> None:
    """Change the number of generators with the command line."""
    command = [
        str(Path(sys.executable).with_name("async-rl")),
        "scale",
        str(run.run_dir),
        f"generators={generators}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def commits_s(run: LiveRun) -> list[float]:
    """Return the commit time of each step."""
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        return [at_s for (at_s,) in store.execute("SELECT committed_s FROM steps ORDER BY version")]


def first_work(run: LiveRun, generator: str, since_s: float) -> tuple[float, int]:
    """Return when the generator received its first group after since_s, and its version then."""
    with contextlib.closing(sqlite3.connect(run.run_dir / "store.sqlite")) as store:
        query = (
            "SELECT at_s, version FROM transitions WHERE generator=? AND state='generating' AND"
            " at_s>? ORDER BY at_s LIMIT 1"
        )
        at_s, version = store.execute(query, (generator, since_s)).fetchone()
    return float(at_s), int(version)


def gaps(times_s: list[float], begin_s: float, end_s: float) -> list[float]:
    """Return the seconds between consecutive steps, for steps that end within the window."""
    return [
        after - before for before, after in itertools.pairwise(times_s) if begin_s < after <= end_s
    ]


def report(run: LiveRun, first_scale_s: float) -> None:
    """Print the figures of a run that was scaled."""
    times_s = commits_s(run)
    alone = gaps(times_s, times_s[WARM_UP_STEPS], first_scale_s)
    scaled = gaps(times_s, first_scale_s, times_s[-1])
    step_s = statistics.median(alone)
    figure("a step with one generator, median", step_s, "s")
    figure("longest time without a step, one generator", max(alone), "s")
    figure("longest time without a step, 1 -> 3 -> 1 -> 2", max(scaled), "s")
    figure(
        "the same over the longest with one generator", max(scaled) / max(alone), "x", goal="<= 2"
    )
    for name in ("generator-1", "generator-2"):
        for joined_s in supervisor_said(run, f"{name} serves at"):
            at_s, version = first_work(run, name, joined_s)
            around = gaps(times_s, joined_s - 5, joined_s + 5)
            current = sum(one <= joined_s for one in times_s)
            figure(f"{name} serves, to its first group", at_s - joined_s, "s")
            figure(
                "  in version intervals of that time",
                (at_s - joined_s) / statistics.median(around),
                "intervals",
                goal="< 1",
            )
            figure(
                "  versions its first group is behind the one at its join",
                max(0, current - version),
                "versions",
                goal="0",
            )


def main() -> None:
    """Run, scale and report once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    settings = [*SETTINGS, f"generation.engine={parser.parse_args().engine}"]
    with (
        tempfile.TemporaryDirectory(prefix="bench-scaling-") as scratch,
        LiveRun(scratch, settings) as run,
    ):
        run.wait_for(WARM_UP_STEPS + ALONE_STEPS)
        first_scale_s = time.time()
        for generators in (3, 1, 2):
            seen = (
                len(supervisor_said(run, r"generator-\d serves at")),
                len(supervisor_said(run, r"generator-\d has left")),
            )
            before = 3 if generators == 1 else 1
            scale(run, generators)
            joining, leaving = max(0, generators - before), max(0, before - generators)
            until(functools.partial(has_said, run, r"generator-\d serves at", seen[0] + joining))
            until(functools.partial(has_said, run, r"generator-\d has left", seen[1] + leaving))
            run.wait_for(run.step() + MORE_STEPS)
        report(run, first_scale_s)


if __name__ == "__main__":
    main()
