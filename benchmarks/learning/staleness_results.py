"""Cells of the league and of the rates: their settings, their records, and results in numbers.

How cells run: staleness.py; tables: staleness_report.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from benchmarks.learning.staleness_cell import COLLAPSE, GOAL, samples_to
from benchmarks.study import RESULTS, Recorded, Row

# The factors of the quickest cell without a collapse: the four FACTORS at age 16 on seed 100 for
# each method (`tune`).
FACTOR_OF = {"grpo": 0.5, "gspo": 2.0, "vcpo": 1.0, "vespo": 1.0, "dppo": 1.0}
METHODS = tuple(FACTOR_OF)
DEFAULT = "grpo"
"""The method that the others are compared with."""
AS_LAUNCHED = "grpo constant"
"""The default with the constant rate of a launched run, which is not tuned."""
# The oldest first: what the cells are made for.
AGES = (64, 16, 2, 0)
SEEDS = (0, 1, 2, 3, 4)
TUNING_AGE, TUNING_SEED = 16, 100
FACTORS = (1.0, 0.5, 2.0, 0.25)
# The rates that the factors multiply.
RATE_OF = {"gspo": 1e-4}
RATE = 4e-4
NUM_STEPS = 100
# Half of the default batch and half of its held-out prompts, so that 100 steps cost what 50 do.
SETTINGS = (
    "buffer.age_rule=exact",
    "buffer.groups_per_step=8",
    "evaluation.every_steps=10",
    "evaluation.num_prompts=128",
    "reward.stop_on=[]",
)
# One schedule for all methods, so that none has a choice that another lacks.
SCHEDULE = "cosine"
RUN_UP_STEPS = 64
# A sixteenth of the default rate: the policy moves at every step, and most is left to learn.
_RUN_UP = (
    "algorithm=grpo",
    "learner.optimizer.schedule=constant",
    f"learner.optimizer.lr={RATE / 16}",
)
RATES = (3e-4, 4e-4)
RATE_SEEDS = tuple(range(15))
RATE_AGES = (1, 2, 0)
# Cells of one line of a table differ in these; where a run writes and which cores it has do not
# change its numbers, and a cell has no engine whose head could have another type.
MAY_DIFFER = (
    "generation.head_dtype",
    "seed",
    "buffer.max_staleness_versions",
    "output_dir",
    "generators.cores",
    "verifiers.cores",
    "learner.cores",
)
# The bound of async_rl/training/mismatch.py.
FEW = 0.35


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. factor: of the method's rate, or None for a cell of the rates, which starts from the
    initial policy with `rate` and a constant schedule.
    """

    method: str
    age: int
    seed: int
    factor: float | None = None
    rate: float = 0.0

    @property
    def recorded(self) -> Recorded:
        """The record of this cell in its study."""
        name = f"{self.method}-age{self.age}-seed{self.seed}"
        if self.factor is None:
            return Recorded(RESULTS / "staleness_rates.jsonl", f"{name}-{self.rate:g}")
        return Recorded(RESULTS / "staleness.jsonl", f"{name}-x{self.factor:g}")

    @property
    def has_run_up(self) -> bool:
        """Whether older versions exist at the first step."""
        return self.factor is not None

    @property
    def config(self) -> RunConfig:
        """All its settings."""
        file = self.method.split()[0]
        rate = self.rate
        schedule = "constant"
        if self.factor is not None:
            rate = self.factor * RATE_OF.get(file, RATE)
            schedule = "constant" if self.method == AS_LAUNCHED else SCHEDULE
        return compose(
            "grpo_code",
            [
                f"algorithm={file}",
                f"seed={self.seed}",
                f"num_steps={NUM_STEPS}",
                f"buffer.max_staleness_versions={self.age}",
                f"learner.optimizer.lr={rate:g}",
                f"learner.optimizer.schedule={schedule}",
                *SETTINGS,
            ],
        )


def run_up_config(seed: int) -> RunConfig:
    """Return the settings of the steps before a cell."""
    steps = (f"num_steps={RUN_UP_STEPS}", f"buffer.max_staleness_versions={RUN_UP_STEPS}")
    return compose("grpo_code", [f"seed={seed}", *steps, *SETTINGS, *_RUN_UP])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A cell in numbers.

    samples: to GOAL, or all that it trained if it never reached it (is_censored); mean_age: of the
    samples until then; lowest_share: of effective sequences, the lowest mean over ten steps.
    """

    samples: float
    is_censored: bool
    mean_age: float
    final: float
    is_collapsed: bool
    lowest_share: float
    is_warned_first: bool


def rates(rows: Sequence[Row]) -> dict[int, float]:
    """Return the held-out pass rate by step."""
    return {row["step"]: row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row}


def result(rows: Sequence[Row]) -> Result:
    """Return a cell in numbers."""
    found = rates(rows)
    final = statistics.fmean(list(found.values())[-2:])
    reached = samples_to(GOAL, [row for row in rows if "eval/pass_at_1" in row])
    samples = float(rows[-1]["samples"]) if reached is None else reached
    share = "policy/effective_sequences"
    shares = {row["step"]: row[share] for row in rows if share in row}
    is_collapsed = max(found.values()) - final > COLLAPSE
    warned = next((step for step, value in shares.items() if value < FEW), None)
    fell = next((step for step in found if _fall(found, step) > COLLAPSE / 2), None)
    return Result(
        samples=samples,
        is_censored=reached is None,
        mean_age=_mean_age(rows, samples),
        final=final,
        is_collapsed=is_collapsed,
        lowest_share=min(shares.values()),
        is_warned_first=warned is not None and (fell is None or warned <= fell),
    )


def _fall(found: Mapping[int, float], step: int) -> float:
    """By how much the pass rate of a step is below its best until then."""
    return max(rate for at, rate in found.items() if at <= step) - found[step]


def _mean_age(rows: Sequence[Row], samples: float) -> float:
    """The mean age of the first samples."""
    total = 0.0
    for before, row in itertools.pairwise(rows):
        part = max(0.0, min(samples, row["samples"]) - before["samples"])
        total += part * row.get("staleness/mean_versions", 0.0)
    return total / samples


def tuning(method: str) -> list[Cell]:
    """Return the cells that decide FACTOR_OF."""
    return [
        Cell(method=method, age=TUNING_AGE, seed=TUNING_SEED, factor=factor) for factor in FACTORS
    ]


def factor_of(method: str) -> float:
    """Return the factor of the scored cells; a method that is not tuned has its own rate."""
    return FACTOR_OF.get(method, 1.0)


def cells_of(method: str, age: int) -> list[Cell]:
    """Return the scored cells of a method at an age that have run."""
    factor = factor_of(method)
    cells = (Cell(method=method, age=age, seed=seed, factor=factor) for seed in SEEDS)
    return [cell for cell in cells if cell.recorded.exists()]


def rate_cells(rate: float, age: int) -> list[Cell]:
    """Return the cells of the default with a constant rate, from the initial policy, that ran."""
    cells = (Cell(method=DEFAULT, age=age, seed=seed, rate=rate) for seed in RATE_SEEDS)
    return [cell for cell in cells if cell.recorded.exists()]
