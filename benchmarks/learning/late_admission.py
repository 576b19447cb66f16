"""Compare runs whose groups start as late as the learner needs them with runs without this rule.

Run: `python -m benchmarks.learning.late_admission --seeds 15`; `report` prints what is recorded.
Both variants of a seed are launched one after the other on the same cores; the order alternates.
The variant "early" replaces one function of the buffer, because no setting switches the rule off.
Steps after the first ten count. --lanes: lists of cores (0,1), a run on each at once. --total-s: no
run starts that would probably finish later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.composition.overrides import with_defaults
from benchmarks.figures import figure
from benchmarks.study import RESULTS, Recorded, Row, recorded

GOAL = 0.80
FIRST = 10
KEPT = (
    "step",
    "time_s",
    "time/step_s",
    "time/wait_batch_s",
    "staleness/mean_versions",
    "staleness/max_versions",
    "reward/mean",
    "eval/pass_at_1",
)
FIXED = (
    "checkpoint.every_steps=0",
    "checkpoint.every_minutes=0",
    "monitoring.tensorboard_port=null",
)
_EARLY = "import async_rl.buffer.leases as pace\npace.Pace._plan = lambda *_: None\n"


def launch(words: list[str], *, is_late: bool, cores: str) -> list[Row]:
    """Make a run on these cores and return its rows."""
    with tempfile.TemporaryDirectory() as scratch:
        # Python imports this module at the start of every process of the run.
        if not is_late:
            Path(scratch, "sitecustomize.py").write_text(_EARLY)
        paths = [scratch, os.environ.get("PYTHONPATH", "")]
        pinned = ["taskset", "-c", cores] if cores else []
        command = [
            *pinned,
            sys.executable,
            "-m",
            "async_rl.launchers.cli",
            "launch",
            *with_defaults(words, FIXED),
        ]
        subprocess.run(
            [*command, f"output_dir={scratch}", "run_name=run"],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{name: row[name] for name in KEPT if name in row} for row in rows]


def figures_of(rows: list[Row]) -> dict[str, float]:
    """Return mean age, steps per second, share of waits, samples to the goal (nan: never)."""
    steps = [row for row in rows if row["step"] > FIRST and "time/step_s" in row]
    seconds = sum(row["time/step_s"] for row in steps)
    curve = [(row["step"], row["eval/pass_at_1"]) for row in rows if "eval/pass_at_1" in row]
    reached = float("nan")
    for (begin, low), (end, high) in itertools.pairwise(sorted(curve)):
        if high >= GOAL:
            reached = begin + (end - begin) * (GOAL - low) / (high - low)
            break
    return {
        "age": statistics.fmean(row["staleness/mean_versions"] for row in steps),
        "oldest": statistics.fmean(row["staleness/max_versions"] for row in steps),
        "steps/s": len(steps) / seconds,
        "waits": sum(row["time/wait_batch_s"] for row in steps) / seconds,
        "steps to goal": reached,
        "reward": statistics.fmean(row["reward/mean"] for row in steps),
    }


def work(jobs: Iterator[int], file: Path, words: list[str], cores: str, until_s: float) -> None:
    """Make runs of both variants for seed after seed until the time is over."""
    longest_s = 0.0
    for seed in jobs:
        for is_late in (seed % 2 == 0, seed % 2 == 1):
            name = f"{seed:03} {'late' if is_late else 'early'}"
            if Recorded(file, name).exists():
                continue
            began_s = time.monotonic()
            if began_s + longest_s > until_s:
                return
            try:
                rows = launch([*words, f"seed={seed}"], is_late=is_late, cores=cores)
            except subprocess.CalledProcessError as error:
                print(f"{name}: exit status {error.returncode}", flush=True)
                return
            longest_s = max(longest_s, time.monotonic() - began_s)
            Recorded(file, name).write(rows)
            print(name, figures_of(rows), f"{longest_s:.0f} s", flush=True)


def report(file: Path) -> None:
    """Print each variant's means over the seeds that have both, and their paired differences."""
    found = {name: figures_of(rows) for name, rows in recorded(file).items()}
    seeds = sorted({name[:3] for name in found})
    seeds = [seed for seed in seeds if {f"{seed} late", f"{seed} early"} <= {*found}]
    for metric in found[f"{seeds[0]} late"] if seeds else ():
        late, early = ([found[f"{s} {v}"][metric] for s in seeds] for v in ("late", "early"))
        pairs = [(a, b) for a, b in zip(late, early, strict=True) if a == a and b == b]
        ratios = [a / b for a, b in pairs if b]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
        means = " ".join(f"{statistics.fmean(values):.3f}" for values in zip(*pairs, strict=True))
        print(f"{metric}: late, early {means}, {len(pairs)} of {len(seeds)} seeds", flush=True)
        if ratios:
            figure(f"{metric}, late over early (+- {error:.3f})", statistics.fmean(ratios), "x")


def main() -> None:
    """Make the runs and report them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("run", "report"), nargs="?", default="run")
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--lanes", nargs="*", default=[""])
    parser.add_argument("--total-s", type=float, default=float("inf"))
    parser.add_argument("--file", type=Path, default=RESULTS / "late_admission.jsonl")
    parser.add_argument("--words", nargs="*", default=["conf=grpo_code", "num_steps=40"])
    given = parser.parse_args()
    if given.part == "run":
        jobs = _Shared(range(given.seeds))
        until_s = time.monotonic() + given.total_s
        lanes = [
            threading.Thread(target=work, args=(jobs, given.file, given.words, cores, until_s))
            for cores in given.lanes
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    report(given.file)


class _Shared:
    """An iterator for several threads."""

    def __init__(self, values: range) -> None:
        self._values: Iterator[Any] = iter(values)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            return next(self._values)


if __name__ == "__main__":
    main()
