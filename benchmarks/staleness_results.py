"""Cells of the league: their settings and files, what they amount to, and the tables of them.

A cell is decided by its file, so that a table can be written without running anything. How cells
run: staleness.py.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.launchers.configuration.compose import compose_unchecked
from benchmarks.figures import figure
from benchmarks.staleness_cell import COLLAPSE, GOAL, samples_to

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "staleness"
PAGE = ROOT / "docs" / "staleness.md"
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"
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
AGES = (0, 2, 8, 16, 64)
SEEDS = (0, 1, 2, 3, 4)
TUNING_AGE, TUNING_SEED = 16, 100
# The default first, so that whatever has run is comparable.
FACTORS = (1.0, 0.5, 2.0, 0.25)
NUM_STEPS = 160
# Half of the default batch and half of its held-out prompts, so that 240 steps cost what 120 do.
SETTINGS = (
    "buffer.exact_age=true",
    "buffer.groups_per_step=8",
    "evaluation.every_steps=10",
    "evaluation.num_prompts=128",
    "reward.stop_if_all_fail=false",
)
# 16 updates need 16 groups; a step of a cell has 8.
OWN_SETTINGS = {"cispo": ("learner.minibatches=8",)}
SAMPLES_PER_STEP = 64


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    method: str
    age: int
    seed: int
    factor: float
    is_live: bool = False

    @property
    def path(self) -> Path:
        """The file of its rows."""
        folder = RESULTS / "live" if self.is_live else RESULTS
        return folder / f"{self.method}-age{self.age}-seed{self.seed}-x{self.factor:g}.jsonl"

    def settings(self, num_steps: int, extra: Sequence[str]) -> list[str]:
        """Its settings on top of conf/grpo_code.yaml."""
        return [
            f"algorithm={self.method}",
            f"seed={self.seed}",
            f"num_steps={num_steps}",
            f"learner.optimizer.lr={self.factor * learning_rate(self.method):g}",
            f"buffer.max_staleness_versions={self.age}",
            *SETTINGS,
            *OWN_SETTINGS.get(self.method, ()),
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
    """Return the rate of the method's file."""
    rate: float = compose_unchecked("grpo_code", [f"algorithm={method}"]).learner.optimizer.lr
    return rate


def read(path: Path) -> list[Row]:
    """Return the rows of a cell."""
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        if cell.path.exists():
            tuned = result(read(cell.path))
            reaches = tuned.samples is not None and not tuned.is_collapsed
            found[factor] = (reaches, -(tuned.samples or 0) if reaches else tuned.final)
    return max(found, key=lambda factor: found[factor], default=1.0)


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
        "| method | age | runs | samples to 0.80 | reached | final pass@1 | collapsed |"
        " effective sequences |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        for age in AGES:
            results = [result(read(cell.path)) for cell in cells_of(method, age)]
            if not results:
                continue
            samples = [r.samples for r in results if r.samples is not None]
            cells = (
                f"{method} x{best_factor(method):g}",
                str(age),
                str(len(results)),
                spread(samples),
                f"{len(samples)} of {len(results)}",
                spread([r.final for r in results]),
                f"{sum(r.is_collapsed for r in results)} of {len(results)}",
                spread([r.effective_sequences for r in results]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
            if not cell.path.exists():
                cells.append("")
                continue
            tuned = result(read(cell.path))
            samples = "never" if tuned.samples is None else f"{tuned.samples:.0f}"
            collapsed = ", collapsed" if tuned.is_collapsed else ""
            cells.append(f"{samples}; {tuned.final:.2f}{collapsed}")
        if any(cells):
            lines.append(f"| {method} | {' | '.join(cells)} |")
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
    """Print the figures, and write the table of the page and the picture."""
    for method in METHODS:
        for age in AGES:
            for cell in cells_of(method, age):
                numbers = result(read(cell.path))
                figure(f"{cell.path.stem}: final held-out pass rate", numbers.final, "share")
    text = PAGE.read_text()
    for name, written in (("league", table()), ("tuning", tuning_table())):
        begin, end = BEGIN.format(name), END.format(name)
        head, _, rest = text.partition(begin)
        text = head + begin + written + end + rest.partition(end)[2]
    PAGE.write_text(text)
    draw()
