"""The league of off-policy methods: runs at an exact age, with equal budgets of tuning.

A cell is a method (a file of conf/algorithm), an age, a seed and a factor of the method's learning
rate. Every batch of a run has exactly that age, so methods differ in nothing but their objective. A
cell's rows are recorded in benchmarks/results/staleness.jsonl when it is finished; a cell that is
recorded is not
repeated, so the command resumes where it was stopped, and deleting a file repeats its cell.

A cell runs in this process (staleness_cell.py) with half of the default batch; `--live` runs whole
runs of the same settings instead, in staleness_live.jsonl.

Tuning: every method runs with the same multiples of its default rate, one seed that is not scored,
at one age; the multiple that reaches the goal with the fewest samples, without a collapse, is then
used at every age. Without tuning that is 1 for all.

Run, in this order, each as often as needed:
  python -m benchmarks.learning.staleness tune [--methods ...] [--limit-s N] python -m
  benchmarks.learning.staleness run [--methods ...] [--ages ...] [--seeds ...] [--limit-s N] python
  -m benchmarks.learning.staleness cost [--methods ...] python -m benchmarks.learning.staleness
  report
`cost` measures the CPU time of the learner's steps, all methods in turn on the same groups.
`--long` runs every cell to its last step and records it in staleness_long.jsonl: a cell that has
held the goal may still fall. `--limit-s` starts no further cell after that time. Settings may
follow `--`; with `--live` a real model (`model.path=...`) is one of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from async_rl.composition.compose import compose
from async_rl.core.types import Group
from async_rl.data.prepare import prepare_model
from benchmarks.learning.staleness_cell import Bench, make_trainer, run_cell
from benchmarks.learning.staleness_results import (
    AGES,
    COMBINATIONS,
    COST,
    FACTORS,
    GONE,
    METHODS,
    NUM_STEPS,
    SAMPLES_PER_STEP,
    SEEDS,
    TUNING_AGE,
    TUNING_SEED,
    Cell,
    best_factor,
    report,
    result,
)
from benchmarks.study import Recorded, Row


class _HasRows(Protocol):
    """A cell of this study or of lora.py."""

    @property
    def recorded(self) -> Recorded: ...


C = TypeVar("C", bound=_HasRows)

_COST_ROUNDS = 15
_KEPT = (
    "step",
    "eval/pass_at_1",
    "reward/mean",
    "policy/effective_sequences",
    "policy/effective_sample_size",
    "policy/step_scale",
    "policy/entropy",
    "staleness/mean_versions",
    "staleness/max_versions",
    "tokens/trained",
)


def launch(cell: Cell, num_steps: int, extra: Sequence[str]) -> list[Row]:
    """Run a cell as a whole run and return its rows. Raises SystemExit if the run fails."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            str(Path(sys.executable).with_name("async-rl")),
            "launch",
            "conf=grpo_code",
            *cell.settings(num_steps, extra),
            f"output_dir={scratch}",
            "run_name=run",
            "checkpoint.every_steps=0",
            "monitoring.tensorboard_port=null",
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"{cell.recorded.name}: exit code {done.returncode} of {command}")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    wrong = inexact(rows, cell.age)
    if wrong:
        raise SystemExit(f"{cell.recorded.name}: steps {wrong} trained tokens of another age")
    return [
        {
            "samples": row["step"] * SAMPLES_PER_STEP,
            **{name: row[name] for name in _KEPT if name in row},
        }
        for row in rows
        if "eval/pass_at_1" in row
    ]


def in_this_process(bench: Bench, cell: Cell, num_steps: int, extra: Sequence[str]) -> list[Row]:
    """Run a cell here and return its rows."""
    config = compose("grpo_code", cell.settings(num_steps, extra))
    with tempfile.TemporaryDirectory() as scratch:
        return run_cell(bench, config, Path(scratch), all_steps=cell.is_long)


def measure_cost(bench: Bench, methods: Sequence[str]) -> dict[str, float]:
    """Return the median CPU seconds of a step of the learner by method, measured in turn."""
    trainers = {}
    groups: list[Group] = []
    with tempfile.TemporaryDirectory() as scratch:
        for method in methods:
            cell = Cell(method=method, age=max(AGES), seed=0, factor=best_factor(method))
            config = compose("grpo_code", cell.settings(NUM_STEPS, ()))
            trainers[method] = make_trainer(config, bench.model_path, Path(scratch))
            if not groups:
                bench.load(trainers[method])
                groups = bench.batch(config, number=0, version=0)
        spent: dict[str, list[float]] = {method: [] for method in methods}
        for version in range(_COST_ROUNDS):
            for method, trainer in trainers.items():
                started_s = time.process_time()
                trainer.step(groups, version)
                spent[method].append(time.process_time() - started_s)
    return {method: statistics.median(times) for method, times in spent.items()}


def inexact(rows: Sequence[Row], age: int) -> list[int]:
    """Return the steps that trained a token of another age; the first ones can have no higher age
    than their number.
    """
    return [
        row["step"]
        for row in rows
        if "staleness/max_versions" in row
        and {row["staleness/max_versions"], row["staleness/mean_versions"]}
        != {min(age, row["step"] - 1)}
    ]


def finish(cells: Iterable[C], run: Callable[[C], list[Row]], *, limit_s: float) -> None:
    """Run the cells that are not recorded, until no time is left to start another."""
    deadline_s = time.monotonic() + limit_s
    for cell in cells:
        if cell.recorded.exists():
            continue
        if time.monotonic() > deadline_s:
            print("no time for another cell; run the command again to continue")
            return
        started_s = time.process_time()
        rows = run(cell)
        cell.recorded.write(rows)
        spent_s = time.process_time() - started_s
        print(f"{cell.recorded.name}: {result(rows)}, {spent_s:.0f} CPU s", flush=True)


def main() -> None:
    """Tune, run or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["tune", "run", "cost", "report"])
    methods = [method for method in METHODS if method not in GONE]
    parser.add_argument("--methods", nargs="+", default=methods, choices=[*methods, *COMBINATIONS])
    parser.add_argument("--ages", nargs="+", type=int, default=AGES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--long", action="store_true", help="every cell to its last step")
    parser.add_argument("--factor", type=float, help="of the rate; default: the tuned factor")
    parser.add_argument("--live", action="store_true", help="whole runs instead of one process")
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("settings", nargs="*", help="settings of every run, after --")
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    live = given.live
    cells = [
        Cell(
            method=method,
            age=age,
            seed=seed,
            factor=given.factor or best_factor(method),
            is_live=live,
            is_long=given.long,
        )
        for seed in given.seeds
        for age in given.ages
        for method in given.methods
    ]
    if given.command == "tune":
        cells = [
            Cell(method=m, age=TUNING_AGE, seed=TUNING_SEED, factor=factor, is_live=live)
            for factor in FACTORS
            for m in given.methods
        ]
    num_steps, extra = given.num_steps, given.settings
    if live:
        finish(cells, lambda cell: launch(cell, num_steps, extra), limit_s=given.limit_s)
        return
    with Bench(prepare_model(compose("grpo_code", []), lambda *_: None)) as bench:
        if given.command == "cost":
            found = measure_cost(bench, given.methods)
            COST.write_text(json.dumps({m: round(s, 4) for m, s in found.items()}, indent=1))
            return
        finish(
            cells,
            lambda cell: in_this_process(bench, cell, num_steps, extra),
            limit_s=given.limit_s,
        )


if __name__ == "__main__":
    main()
