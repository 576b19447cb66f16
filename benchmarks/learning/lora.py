"""Compare learning with an adapter to learning with all weights on the embedded task.

Run: `python -m benchmarks.learning.lora tune`, then `run`, then `report`; each resumes where it was
stopped. A cell is one run of conf=grpo_code in this process at age 0 (staleness_cell.py), with rank
16 in all linear layers or without an adapter. Both get the same prompts, and the same samples of
version 0. Three further kinds train the matrices that an adapter changes, whole: alone, with the
norms, and with the embedding. They show the cost of the rank and of the rest. The adapter's
learning rate is the one of four multiples of the rate for all weights with the highest mean pass
rate over a run, on a seed that is not scored; `--factor` runs another one. Rows are kept in
benchmarks/results/lora.jsonl; `report` writes the picture and prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.data.model_files import prepare_model
from async_rl.learner.trainer import Trainer
from benchmarks.comparing import spread
from benchmarks.figures import figure
from benchmarks.learning.bench import Bench
from benchmarks.learning.staleness import finish
from benchmarks.learning.staleness_cell import GOAL, run_cell
from benchmarks.learning.staleness_results import RATE, SETTINGS, rates, result
from benchmarks.study import RESULTS, Recorded, Row

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "lora.png"
FACTORS = (2.5, 5.0, 10.0, 25.0)
SEEDS, TUNING_SEED = (0, 1, 2), 100
NUM_STEPS = 160
MATRICES = ("matrices", "matrices+norms", "matrices+embedding")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. kind: full, lora or one of MATRICES. factor: of the rate for all weights."""

    kind: str
    seed: int
    factor: float = 1.0

    @property
    def recorded(self) -> Recorded:
        """The rows of this run in the study."""
        name = f"{self.kind}-seed{self.seed}-x{self.factor:g}"
        return Recorded(RESULTS / "lora.jsonl", name)

    @property
    def config(self) -> RunConfig:
        """All its settings."""
        settings = [
            f"model.lora={'lora' if self.kind == 'lora' else 'none'}",
            f"seed={self.seed}",
            f"num_steps={NUM_STEPS}",
            f"learner.optimizer.lr={self.factor * RATE:g}",
            "buffer.max_staleness_versions=0",
            *SETTINGS,
        ]
        return compose("grpo_code", settings)

    def run(self, bench: Bench) -> list[Row]:
        """Train all steps and return a row per evaluation."""
        return run_cell(
            bench,
            self.config,
            all_steps=True,
            prepare=self._only_its_parts if self.kind in MATRICES else None,
        )

    def _only_its_parts(self, trainer: Trainer) -> None:
        train_only(self.kind, trainer)


def train_only(kind: str, trainer: Trainer) -> None:
    """Set the gradient of every weight outside `kind` (parts joined by +) to 0."""
    for name, parameter in trainer._policy.named_parameters():
        is_matrix = parameter.ndim == 2 and ".layers." in name
        part = "matrices" if is_matrix else "norms" if parameter.ndim == 1 else "embedding"
        if part not in kind.split("+"):
            parameter.register_hook(torch.zeros_like)


def tuning() -> list[Cell]:
    """Return the cells among which the adapter's learning rate is chosen."""
    return [Cell(kind="lora", seed=TUNING_SEED, factor=factor) for factor in FACTORS]


def mean_rate(rows: Sequence[Row]) -> float:
    """Return the mean held-out pass rate of a run: a final rate alone would not show the speed."""
    return statistics.fmean(rates(rows).values())


def scored(factor: float) -> list[Cell]:
    """Return the cells of the adapter at a factor of the rate."""
    return [Cell(kind="lora", seed=seed, factor=factor) for seed in SEEDS]


def without_adapter(kind: str) -> list[Cell]:
    """Return the cells that train all weights, or whole matrices."""
    return [Cell(kind=kind, seed=seed) for seed in SEEDS]


def best_factor() -> float:
    """Return the factor with the highest mean pass rate in the tuning."""
    means = {c.factor: mean_rate(c.recorded.rows()) for c in tuning() if c.recorded.exists()}
    if len(means) < len(FACTORS):
        raise SystemExit("the rate is not chosen yet: python -m benchmarks.learning.lora tune")
    return max(means, key=lambda factor: means[factor])


def report() -> None:
    """Print the table and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for cell in tuning():
        rows = cell.recorded.rows()
        figure(f"tuning {cell.recorded.name}: mean pass@1", mean_rate(rows), "share")
        figure(f"tuning {cell.recorded.name}: final pass@1", result(rows).final, "share")
    picture, axis = pyplot.subplots(figsize=(6, 3.5))
    others = [*map(without_adapter, MATRICES), *(scored(factor) for factor in FACTORS)]
    compared = [
        without_adapter("full"),
        *(cells for cells in others if all(cell.recorded.exists() for cell in cells)),
    ]
    for index, cells in enumerate(compared):
        kind = f"{cells[0].kind}, rate x{cells[0].factor:g}"
        found = [cell.recorded.rows() for cell in cells]
        results = [result(rows) for rows in found]
        samples = [r.samples for r in results if not r.is_censored]
        finals = [r.final for r in results]
        print(f"| {kind} | {spread(samples)} | {len(samples)} of {len(cells)} | {spread(finals)} |")
        figure(f"{kind}: final pass@1", statistics.fmean(finals), "share")
        for number, rows in enumerate(found):
            curve = rates(rows)
            label = kind if number == 0 else None
            axis.plot(list(curve), list(curve.values()), color=f"C{index}", alpha=0.7, label=label)
    axis.axhline(GOAL, color="grey", linewidth=0.5)
    axis.set_xlabel("step")
    axis.set_ylabel("held-out pass@1")
    axis.legend()
    picture.tight_layout()
    picture.savefig(PICTURE, dpi=80)


def main() -> None:
    """Tune, run or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tune", "run", "report"])
    parser.add_argument("--factor", type=float, choices=FACTORS)
    parser.add_argument("--limit-s", type=float, default=1e9)
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    cells = (
        tuning()
        if given.command == "tune"
        else [
            *without_adapter("full"),
            *(cell for kind in MATRICES for cell in without_adapter(kind)),
            *scored(given.factor or best_factor()),
        ]
    )
    with Bench(prepare_model(compose("grpo_code", []), lambda *_: None)) as bench:
        finish(cells, lambda cell: cell.run(bench), limit_s=given.limit_s)


if __name__ == "__main__":
    main()
