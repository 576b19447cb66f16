"""The league of off-policy methods: runs at an exact age, with equal budgets of tuning.

A cell is a method (a file of conf/algorithm), an age, a seed and a factor of the method's learning
rate. Every batch of a cell has exactly that age, so methods differ in nothing but their objective.
A cell's rows are recorded in benchmarks/results/staleness.jsonl with all settings and the commit
when it is finished. A cell that is recorded is not repeated, so the command resumes where it was
stopped; deleting its line repeats it.

Tuning: every method runs with the same multiples of its default rate and the same schedule, one
seed that is not scored, at one age; the multiple that reaches the goal with the fewest samples,
without a collapse, is then used at every age (FACTOR_OF in staleness_results.py).

Run, each as often as needed:
  python -m benchmarks.learning.staleness tune [--methods ...] [--limit-s N]
  python -m benchmarks.learning.staleness run [--methods ...] [--ages ...] [--seeds ...]
  python -m benchmarks.learning.staleness rates [--ages ...] [--seeds ...]
  python -m benchmarks.learning.staleness whole [--seeds ...]
  python -m benchmarks.learning.staleness report
`rates` runs the default from the initial policy at constant rates and young ages, `whole`
launches conf=grpo_code with the same rates. `--limit-s` starts no further run after that time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.data.model_files import prepare_model
from benchmarks.learning.bench import Bench
from benchmarks.learning.staleness_cell import RunUp, run_cell, run_up
from benchmarks.learning.staleness_report import report
from benchmarks.learning.staleness_results import (
    AGES,
    AS_LAUNCHED,
    DEFAULT,
    METHODS,
    RATE_AGES,
    RATES,
    SEEDS,
    Cell,
    factor_of,
    rates,
    run_up_config,
    tuning,
)
from benchmarks.learning.staleness_whole import WholeRun
from benchmarks.study import RESULTS, Recorded, Row, commit


class _Run(Protocol):
    """A run of this study or of lora.py."""

    @property
    def recorded(self) -> Recorded: ...

    @property
    def config(self) -> RunConfig: ...


C = TypeVar("C", bound=_Run)


class Cells:
    """Runs cells of one process one after the other; cells of a seed share their run-up."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        """directory: of the run-ups, which several processes may share."""
        self._bench = bench
        self._directory = directory
        self._run_ups: dict[int, RunUp] = {}

    def run(self, cell: Cell) -> list[Row]:
        """Run a cell and return its rows."""
        start = self.run_up(cell.seed) if cell.has_run_up else None
        return run_cell(self._bench, cell.config, start=start)

    def run_up(self, seed: int) -> RunUp:
        """Return the steps before the cells of a seed."""
        if seed not in self._run_ups:
            directory = self._directory / f"seed{seed}"
            directory.mkdir(parents=True, exist_ok=True)
            self._run_ups[seed] = run_up(self._bench, run_up_config(seed), directory)
        return self._run_ups[seed]


def finish(runs: Iterable[C], run: Callable[[C], list[Row]], *, limit_s: float) -> None:
    """Make the runs that are not recorded, until no time is left to start another."""
    # Of the code that is loaded now, whatever is committed while the runs are made.
    commit()
    deadline_s = time.monotonic() + limit_s
    for one in runs:
        if one.recorded.exists():
            continue
        if time.monotonic() > deadline_s:
            print("no time for another run; run the command again to continue")
            return
        started_s = time.process_time()
        rows = run(one)
        one.recorded.write(rows, config=one.config)
        spent_s = time.process_time() - started_s
        curve = " ".join(f"{rate:.2f}" for rate in rates(rows).values())
        print(f"{one.recorded.name}: {spent_s:.0f} CPU s, pass rates {curve}", flush=True)


def main() -> None:
    """Tune, run or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tune", "run", "rates", "whole", "report"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=[*METHODS, AS_LAUNCHED])
    parser.add_argument("--ages", nargs="+", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, choices=RATES)
    parser.add_argument("--limit-s", type=float, default=1e9)
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    if given.command == "whole":
        runs = (WholeRun(rate=rate, seed=seed) for seed in given.seeds for rate in RATES)
        finish(runs, WholeRun.launch, limit_s=given.limit_s)
        return
    with Bench(prepare_model(compose("grpo_code", []), lambda *_: None)) as bench:
        # Other code makes other run-ups.
        cells = Cells(bench, RESULTS.parents[1] / "build" / "run_ups" / commit())
        finish(_cells(given), cells.run, limit_s=given.limit_s)


def _cells(given: argparse.Namespace) -> Iterable[Cell]:
    """The cells that the command names, grouped by seed."""
    if given.command == "tune":
        yield from (cell for method in given.methods for cell in tuning(method))
    elif given.command == "rates":
        yield from (
            Cell(method=DEFAULT, age=age, seed=seed, rate=rate)
            for seed in given.seeds
            for age in given.ages or RATE_AGES
            for rate in given.rates
        )
    else:
        yield from (
            Cell(method=method, age=age, seed=seed, factor=factor_of(method))
            for seed in given.seeds
            for age in given.ages or AGES
            for method in given.methods
        )


if __name__ == "__main__":
    main()
