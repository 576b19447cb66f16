"""The league of off-policy methods: real runs at an exact age, with equal budgets of tuning.

A cell is a method (a file of conf/algorithm), an age, a seed and a factor of the method's learning
rate. Every batch of a run has exactly that age (buffer.exact_age), so methods differ in nothing but
their objective. A cell's rows are written to RESULTS/<cell>.jsonl when its run has ended; a cell
that has a file is not repeated, so the command resumes where it was stopped, and deleting a file
repeats its cell.

Tuning: every method runs with the same multiples of its default rate, one seed that is not scored,
at one age; its best multiple is then used at every age.

Run, in this order, each as often as needed:
  python -m benchmarks.staleness tune [--methods ...] [--limit-s N]
  python -m benchmarks.staleness run [--methods ...] [--ages ...] [--seeds ...] [--limit-s N]
  python -m benchmarks.staleness report
`--limit-s` starts no further cell after that time. `model.path=...` and other settings may follow
`--`: a real model is one of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "staleness"
PICTURE = ROOT / "docs" / "images" / "staleness.png"
METHODS = (
    "grpo",
    "rloo",
    "ppo",
    "dr_grpo",
    "gspo",
    "luspo",
    "cispo",
    "dapo",
    "sapo",
    "vcpo",
    "vespo",
    "m2po",
    "dppo",
    "oapl",
)
AGES = (0, 2, 8, 16, 64)
SEEDS = (0, 1, 2, 3, 4)
TUNING_AGE, TUNING_SEED = 16, 100
FACTORS = (0.25, 0.5, 1.0, 2.0)
NUM_STEPS = 240
GOAL = 0.80
# A fall from the best pass rate that is far above the noise of 256 samples, 0.03.
COLLAPSE = 0.2
_KEPT = (
    "step",
    "time_s",
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    method: str
    age: int
    seed: int
    factor: float

    @property
    def path(self) -> Path:
        """The file of its rows."""
        return RESULTS / f"{self.method}-age{self.age}-seed{self.seed}-x{self.factor:g}.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell in numbers. samples, seconds: to GOAL, None if it was never reached."""

    samples: float | None
    seconds: float | None
    final: float
    is_collapsed: bool
    effective_sequences: float


def learning_rate(method: str) -> float:
    """Return the rate of the method's file."""
    from async_rl.launchers.configuration.compose import compose_unchecked

    rate: float = compose_unchecked("grpo_code", [f"algorithm={method}"]).learner.optimizer.lr
    return rate


def launch(cell: Cell, num_steps: int, extra: Sequence[str]) -> list[dict[str, Any]]:
    """Run a cell to its end and return its rows. Raises SystemExit if the run fails."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            str(Path(sys.executable).with_name("async-rl")),
            "launch",
            "conf=grpo_code",
            f"algorithm={cell.method}",
            f"seed={cell.seed}",
            f"num_steps={num_steps}",
            f"learner.optimizer.lr={cell.factor * learning_rate(cell.method):g}",
            f"buffer.max_staleness_versions={cell.age}",
            "buffer.exact_age=true",
            f"output_dir={scratch}",
            "run_name=run",
            "checkpoint.every_steps=0",
            "monitoring.tensorboard_port=null",
            *extra,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"{cell.path.stem}: exit code {done.returncode} of {command}")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    wrong = inexact(rows, cell.age)
    if wrong:
        raise SystemExit(f"{cell.path.stem}: steps {wrong} trained tokens of another age")
    return [{name: row[name] for name in _KEPT if name in row} for row in rows]


def inexact(rows: Sequence[dict[str, Any]], age: int) -> list[int]:
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


def finish(cells: Iterable[Cell], *, num_steps: int, limit_s: float, extra: Sequence[str]) -> None:
    """Run the cells that have no file, until no time is left to start another."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + limit_s
    for cell in cells:
        if cell.path.exists():
            continue
        if time.monotonic() > deadline_s:
            print("no time for another cell; run the command again to continue")
            return
        rows = launch(cell, num_steps, extra)
        partial = cell.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial.rename(cell.path)
        print(f"{cell.path.stem}: {result(read(cell.path))}", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a cell."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rates(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the held-out pass rate by step."""
    return {row["step"]: row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row}


def result(rows: Sequence[dict[str, Any]], samples_per_step: int = 128) -> Result:
    """Return a cell in numbers."""
    by_step, found = {row["step"]: row for row in rows}, rates(rows)
    first = next((step for step, rate in found.items() if rate >= GOAL), None)
    begin_s = by_step[1]["time_s"]
    final = statistics.fmean(list(found.values())[-2:])
    shares = [r["policy/effective_sequences"] for r in rows if "policy/effective_sequences" in r]
    return Result(
        samples=None if first is None else float(first * samples_per_step),
        seconds=None if first is None else by_step[first]["time_s"] - begin_s,
        final=final,
        is_collapsed=max(found.values()) - final > COLLAPSE,
        effective_sequences=statistics.fmean(shares[len(shares) // 2 :]),
    )


def best_factor(method: str) -> float:
    """Return the factor with the best final pass rate in the tuning, 1 without one."""
    finals = {}
    for factor in FACTORS:
        cell = Cell(method=method, age=TUNING_AGE, seed=TUNING_SEED, factor=factor)
        if cell.path.exists():
            finals[factor] = result(read(cell.path)).final
    return max(finals, key=lambda factor: finals[factor], default=1.0)


def cells_of(method: str, age: int) -> list[Cell]:
    """Return the scored cells of a method at an age that have run, at its best factor."""
    factor = best_factor(method)
    cells = (Cell(method=method, age=age, seed=seed, factor=factor) for seed in SEEDS)
    return [cell for cell in cells if cell.path.exists()]


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation, or what can be said of fewer than two values."""
    if not values:
        return "never"
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.fmean(values):.3g} +- {statistics.stdev(values):.2g}"


def table() -> str:
    """Return the league as a table of Markdown."""
    lines = [
        "| method | age | runs | samples to 0.80 | seconds to 0.80 | reached | final pass@1 |"
        " collapsed | effective sequences |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for age in AGES:
            results = [result(read(cell.path)) for cell in cells_of(method, age)]
            if not results:
                continue
            samples = [r.samples for r in results if r.samples is not None]
            seconds = [r.seconds for r in results if r.seconds is not None]
            cells = (
                f"{method} x{best_factor(method):g}",
                str(age),
                str(len(results)),
                spread(samples),
                spread(seconds),
                f"{len(samples)} of {len(results)}",
                spread([r.final for r in results]),
                f"{sum(r.is_collapsed for r in results)} of {len(results)}",
                spread([r.effective_sequences for r in results]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw() -> None:
    """Write the curves of the held-out pass rate, one picture per age."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure_, axes = pyplot.subplots(1, len(AGES), figsize=(4 * len(AGES), 3.5), sharey=True)
    for axis, age in zip(axes, AGES, strict=True):
        axis.set_title(f"age {age}")
        axis.set_xlabel("step")
        axis.axhline(GOAL, color="grey", linewidth=0.5)
        for index, method in enumerate(METHODS):
            for number, cell in enumerate(cells_of(method, age)):
                found = rates(read(cell.path))
                label = method if number == 0 else None
                axis.plot(
                    list(found), list(found.values()), color=f"C{index}", alpha=0.7, label=label
                )
        if axis.lines[1:]:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("held-out pass@1")
    figure_.tight_layout()
    figure_.savefig(PICTURE, dpi=80)


def report() -> None:
    """Print the figures, and write the table and the picture."""
    for method in METHODS:
        for age in AGES:
            for cell in cells_of(method, age):
                numbers = result(read(cell.path))
                figure(f"{cell.path.stem}: final held-out pass rate", numbers.final, "share")
    (RESULTS / "table.md").write_text(table())
    draw()


def main() -> None:
    """Tune, run or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["tune", "run", "report"])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--ages", nargs="+", type=int, default=AGES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--num-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("settings", nargs="*", help="settings of every run, after --")
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    cells = [
        Cell(method=method, age=age, seed=seed, factor=best_factor(method))
        for seed in given.seeds
        for age in given.ages
        for method in given.methods
    ]
    if given.command == "tune":
        cells = [
            Cell(method=method, age=TUNING_AGE, seed=TUNING_SEED, factor=factor)
            for factor in FACTORS
            for method in given.methods
        ]
    finish(cells, num_steps=given.num_steps, limit_s=given.limit_s, extra=given.settings)


if __name__ == "__main__":
    main()
