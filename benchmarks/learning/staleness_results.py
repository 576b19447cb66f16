"""Cells of the league: their settings and files, their results, and the tables of them.

A cell is decided by its recorded rows, so that a table can be written without running anything. How
cells run: staleness.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import figure, with_table
from benchmarks.learning.staleness_cell import COLLAPSE, GOAL, samples_to
from benchmarks.study import RESULTS, Recorded, Row, recorded

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "staleness.md"
COST = RESULTS / "staleness_cost.json"
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
    "drpo",
    "oapl",
    "mu_grpo",
    "gac",
)
GONE = ("drpo", "mu_grpo")
"""Methods that the project no longer has; their runs are on record."""
AGES = (0, 2, 8, 16, 64)
SEEDS = (0, 1, 2, 3, 4)
# Methods whose choice depends on it have ten cells at some ages.
ALL_SEEDS = range(15)
TUNING_AGE, TUNING_SEED = 16, 100
# The default first, so that whatever has run is comparable.
FACTORS = (1.0, 0.5, 2.0, 0.25)
# Shown next to the best factor: the rate of grpo in a launched run.
AS_LAUNCHED = {"grpo": 1.0}
# The rates that the factors multiply: the rates of conf/algorithm when the tuning started.
RATES = {"cispo": 2.5e-5, "dapo": 2.5e-5, "gspo": 1e-4, "luspo": 1e-4, "sapo": 1e-4, "ppo": 2e-4}
RATE = 4e-4
NUM_STEPS = 160
# Half of the default batch and half of its held-out prompts, so that 240 steps cost what 120 do.
SETTINGS = (
    "buffer.age_rule=exact",
    "buffer.groups_per_step=8",
    "evaluation.every_steps=10",
    "evaluation.num_prompts=128",
    "reward.stop_on=[]",
)
# 16 updates need 16 groups; a step of a cell has 8.
OWN_SETTINGS = dict.fromkeys(("cispo", "dapo"), ("learner.minibatches=8",))
# Combinations without a file of their own: name, the file of the base, and the added settings.
_SCALED = ("algorithm.step_scale=effective_sequences",)
COMBINATIONS = {
    "gspo+scale": ("gspo", _SCALED),
    "gspo+cosine": ("gspo", ("learner.optimizer.schedule=cosine",)),
    "grpo+cosine": ("grpo", ("learner.optimizer.schedule=cosine",)),
    "vespo+scale": ("vespo", _SCALED),
}
SAMPLES_PER_STEP = 64
_COST_AGE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    method: str
    age: int
    seed: int
    factor: float
    is_live: bool = False
    is_long: bool = False

    @property
    def recorded(self) -> Recorded:
        """The rows of this cell in the study."""
        kind = "_live" if self.is_live else "_long" if self.is_long else ""
        name = f"{self.method}-age{self.age}-seed{self.seed}-x{self.factor:g}"
        return Recorded(RESULTS / f"staleness{kind}.jsonl", name)

    def settings(self, num_steps: int, extra: Sequence[str]) -> list[str]:
        """Its settings on top of conf/grpo_code.yaml."""
        file, added = COMBINATIONS.get(self.method, (self.method, ()))
        return [
            f"algorithm={file}",
            f"seed={self.seed}",
            f"num_steps={num_steps}",
            f"learner.optimizer.lr={self.factor * learning_rate(file):g}",
            f"buffer.max_staleness_versions={self.age}",
            *SETTINGS,
            *OWN_SETTINGS.get(self.method, ()),
            *added,
            *extra,
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell in numbers. samples: to GOAL, None if it was never reached."""

    samples: float | None
    final: float
    is_collapsed: bool
    effective_sequences: float


def learning_rate(method: str) -> float:
    """Return the rate of factor 1."""
    return RATES.get(method, RATE)


def rates(rows: Sequence[Row]) -> dict[int, float]:
    """Return the held-out pass rate by step."""
    return {row["step"]: row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row}


def result(rows: Sequence[Row]) -> Result:
    """Return a cell in numbers."""
    found = rates(rows)
    final = statistics.fmean(list(found.values())[-2:])
    shares = [r["policy/effective_sequences"] for r in rows if "policy/effective_sequences" in r]
    return Result(
        samples=samples_to(GOAL, rows),
        final=final,
        is_collapsed=max(found.values()) - final > COLLAPSE,
        effective_sequences=statistics.fmean(shares[len(shares) // 2 :]),
    )


def best_factor(method: str) -> float:
    """Return the factor that needs the fewest samples to GOAL in the tuning and does not collapse;
    without one the factor with the best final pass rate, and 1 without any tuning.
    """
    found = {}
    for factor in FACTORS:
        cell = Cell(method=method, age=TUNING_AGE, seed=TUNING_SEED, factor=factor)
        if cell.recorded.exists():
            tuned = result(cell.recorded.rows())
            reaches = tuned.samples is not None and not tuned.is_collapsed
            found[factor] = (reaches, -(tuned.samples or 0) if reaches else tuned.final)
    return max(found, key=lambda factor: found[factor], default=1.0)


def cells_of(method: str, age: int, factor: float | None = None) -> list[Cell]:
    """Return the scored cells of a method at an age that have run. factor: None = the best one."""
    factor = best_factor(method) if factor is None else factor
    cells = (Cell(method=method, age=age, seed=seed, factor=factor) for seed in ALL_SEEDS)
    return [cell for cell in cells if cell.recorded.exists()]


def lines_of_league() -> list[tuple[str, float]]:
    """Return method and factor of each line: the best factor, and others that are of interest."""
    lines = [(method, best_factor(method)) for method in METHODS]
    shown = [(method, factor) for method, factor in AS_LAUNCHED.items()]
    return [
        line
        for line in dict.fromkeys([*shown, *lines])
        if any(cells_of(line[0], age, line[1]) for age in AGES)
    ]


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Return mean and standard deviation, or the value or "never" of fewer than two values."""
    if not values:
        return "never"
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.fmean(values):{form}} +- {statistics.stdev(values):{form}}"


def samples_cell(results: Sequence[Result]) -> str:
    """Return thousands of samples to GOAL, and how many runs reached it if not all did."""
    if not results:
        return ""
    reached = [r.samples / 1000 for r in results if r.samples is not None]
    missing = f" ({len(reached)} of {len(results)})" if len(reached) < len(results) else ""
    return spread(reached, ".2f") + missing


def collapsed_cell(results: Sequence[Result]) -> str:
    """Return how many runs collapsed, and of how many."""
    return f"{sum(r.is_collapsed for r in results)} of {len(results)}" if results else ""


def table() -> str:
    """Return the league as a table of Markdown: a line per method, a column per age."""
    ages = " | ".join(f"age {age}" for age in AGES)
    heads = f"runs | collapsed | CPU s per step | CPU s to 0.80, age {_COST_AGE}"
    lines = [f"| method | {ages} | {heads} |", f"|---|{'---|' * (len(AGES) + 4)}"]
    costs: dict[str, float] = json.loads(COST.read_text()) if COST.exists() else {}
    for method, factor in lines_of_league():
        by_age = _results(method, factor)
        runs = [result for found in by_age for result in found]
        cells = (
            f"{method} x{factor:g}",
            *(samples_cell(found) for found in by_age),
            str(len(runs)),
            collapsed_cell(runs),
            *_cost_cells(costs.get(method), by_age[AGES.index(_COST_AGE)]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cost_cells(step_s: float | None, results: Sequence[Result]) -> tuple[str, str]:
    if step_s is None:
        return "", ""
    samples = [r.samples for r in results if r.samples is not None]
    until = f"{statistics.fmean(samples) / SAMPLES_PER_STEP * step_s:.1f}" if samples else ""
    return f"{step_s:.2f}", until


def ends_table() -> str:
    """Return the final pass rate at each age, and what old data did: collapses and the effective
    sequences at the two highest ages.
    """
    finals = " | ".join(f"final, age {age}" for age in AGES)
    old = AGES[-2:]
    heads = " | ".join(f"collapsed, {age} | effective sequences, {age}" for age in old)
    lines = [
        f"| method | {finals} | {heads} |",
        f"|---|{'---|' * (len(AGES) + 2 * len(old))}",
    ]
    for method, factor in lines_of_league():
        by_age = _results(method, factor)
        cells = [spread([r.final for r in found], ".2f") if found else "" for found in by_age]
        for found in by_age[-2:]:
            shares = [r.effective_sequences for r in found]
            cells += [collapsed_cell(found), spread(shares, ".2f") if shares else ""]
        lines.append(f"| {method} x{factor:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def deepest_fall(rows: Sequence[Row]) -> float:
    """Return by how much the held-out pass rate fell below its best until then, at most."""
    best = fall = 0.0
    for rate in rates(rows).values():
        best = max(best, rate)
        fall = max(fall, best - rate)
    return fall


def long_table() -> str:
    """Return the mean pass rate of the last five evaluations and the deepest fall of the cells that
    ran to the last step: a line per method and factor, columns per age.
    """
    heads = " | ".join(f"end, age {age} | deepest falls" for age in AGES)
    lines = [f"| method | {heads} |", f"|---|{'---|' * (2 * len(AGES))}"]
    found: dict[tuple[str, str], dict[int, list[list[Row]]]] = {}
    for name, rows in recorded(RESULTS / "staleness_long.jsonl").items():
        method, named_age, _, factor = name.rsplit("-", 3)
        found.setdefault((method, factor), {}).setdefault(int(named_age[3:]), []).append(rows)
    for (method, factor), by_age in sorted(found.items()):
        cells = []
        for age in AGES:
            runs = by_age.get(age, [])
            ends = [statistics.fmean(list(rates(rows).values())[-5:]) for rows in runs]
            falls = sorted((deepest_fall(rows) for rows in runs), reverse=True)
            cells += [spread(ends, ".2f") if ends else "", ", ".join(f"{f:.2f}" for f in falls)]
        lines.append(f"| {method} {factor} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _results(method: str, factor: float) -> list[list[Result]]:
    """The results of the scored cells at each age."""
    return [[result(c.recorded.rows()) for c in cells_of(method, age, factor)] for age in AGES]


def tuning_table() -> str:
    """Return samples to GOAL and final rate of each method and factor of the tuning."""
    lines = [
        f"| method | {' | '.join(f'x{factor:g}' for factor in sorted(FACTORS))} |",
        f"|---|{'---|' * len(FACTORS)}",
    ]
    for method in METHODS:
        cells = []
        for factor in sorted(FACTORS):
            cell = Cell(method=method, age=TUNING_AGE, seed=TUNING_SEED, factor=factor)
            if not cell.recorded.exists():
                cells.append("")
                continue
            tuned = result(cell.recorded.rows())
            samples = "never" if tuned.samples is None else f"{tuned.samples:.0f}"
            collapsed = ", collapsed" if tuned.is_collapsed else ""
            cells.append(f"{samples}; {tuned.final:.2f}{collapsed}")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rates_table() -> str:
    """Return the table of what age 2 costs grpo, with a row for each learning rate."""
    lines = ["| rate | age 0 | age 2 | ratio | final, age 0, 2 |", "|---|---|---|---|---|"]
    for factor in (1.0, 0.75, 0.5):
        found = [
            [result(c.recorded.rows()) for c in cells_of("grpo", age, factor)] for age in (0, 2)
        ]
        reached = [[r.samples for r in ended if r.samples is not None] for ended in found]
        means = [statistics.fmean(samples) for samples in reached]
        ratio = means[1] / means[0]
        errors = [
            statistics.stdev(samples) / mean / len(samples) ** 0.5
            for samples, mean in zip(reached, means, strict=True)
        ]
        cells = [f"{factor * learning_rate('grpo'):g}", *map(samples_cell, found)]
        cells.append(f"{ratio:.2f} +- {ratio * math.hypot(*errors):.2f}")
        cells.append(
            ", ".join(f"{statistics.fmean(r.final for r in ended):.2f}" for ended in found)
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mean_curve(runs: Sequence[Sequence[Row]], name: str) -> dict[int, float]:
    """Return the mean of a column by step. A finished run keeps its last value."""
    columns = [{row["step"]: row[name] for row in rows if name in row} for rows in runs]
    steps = sorted({step for column in columns for step in column})
    curve = {}
    for step in steps:
        values = [
            column[max(known)] for column in columns if (known := [s for s in column if s <= step])
        ]
        curve[step] = statistics.fmean(values)
    return curve


def draw() -> None:
    """Write the mean curves of the held-out pass rate and of the effective sequences, a column of
    pictures per age.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = {
        "eval/pass_at_1": "held-out pass@1",
        "policy/effective_sequences": "effective sequences",
    }
    size = (4 * len(AGES), 7.5)
    figure_, axes = pyplot.subplots(len(columns), len(AGES), figsize=size, sharey="row")
    colors = pyplot.get_cmap("tab20")
    for row, (name, words) in zip(axes, columns.items(), strict=True):
        row[0].set_ylabel(words)
        for axis, age in zip(row, AGES, strict=True):
            axis.set_title(f"age {age}")
            axis.set_xlabel("step")
            if name == "eval/pass_at_1":
                axis.axhline(GOAL, color="grey", linewidth=0.5)
            for index, (method, factor) in enumerate(lines_of_league()):
                runs = [cell.recorded.rows() for cell in cells_of(method, age, factor)]
                if runs:
                    curve = mean_curve(runs, name)
                    axis.plot(
                        list(curve),
                        list(curve.values()),
                        color=colors(index % 20),
                        label=f"{method} x{factor:g}",
                    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure_.legend(handles, labels, loc="lower center", ncols=9, fontsize=8)
    figure_.tight_layout(rect=(0, 0.06, 1, 1))
    figure_.savefig(PICTURE, dpi=80)


def report() -> None:
    """Print every table, and write the one of the page and its picture."""
    for method, factor in lines_of_league():
        for age in AGES:
            for cell in cells_of(method, age, factor):
                numbers = result(cell.recorded.rows())
                figure(f"{cell.recorded.name}: final held-out pass rate", numbers.final, "share")
    print(table(), ends_table(), long_table(), rates_table(), tuning_table(), sep="\n")
    PAGE.write_text(with_table(PAGE.read_text(), "league", page_table()))
    draw()


def page_table() -> str:
    """Return the means of the league without their spread."""
    ages = " | ".join(f"age {age}" for age in AGES)
    lines = [f"| method | {ages} | collapsed |", f"|---|{'---|' * (len(AGES) + 1)}"]
    for method, factor in lines_of_league():
        by_age = _results(method, factor)
        runs = [result for found in by_age for result in found]
        means = [re.sub(r" \+- [\d.]+", "", samples_cell(found)) for found in by_age]
        lines.append(f"| {method} x{factor:g} | {' | '.join(means)} | {collapsed_cell(runs)} |")
    return "\n".join(lines) + "\n"
