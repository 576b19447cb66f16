"""Whole runs of the default objective with each of the two rates, as a user launches them."""

from __future__ import annotations

import dataclasses

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from benchmarks.learning.launched import launched
from benchmarks.study import RESULTS, Recorded, Row

NUM_STEPS = 50
SAMPLES_PER_STEP = 128
_KEPT = (
    "step",
    "eval/pass_at_1",
    "policy/effective_sequences",
    "staleness/mean_versions",
    "staleness/max_versions",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A launched run of conf=grpo_code."""

    rate: float
    seed: int

    @property
    def recorded(self) -> Recorded:
        """The record of this run."""
        name = f"seed{self.seed}-{self.rate:g}"
        return Recorded(RESULTS / "staleness_whole.jsonl", name)

    @property
    def _settings(self) -> list[str]:
        return [
            f"seed={self.seed}",
            f"num_steps={NUM_STEPS}",
            f"learner.optimizer.lr={self.rate:g}",
            "checkpoint.every_steps=0",
            "checkpoint.every_minutes=0",
        ]

    @property
    def config(self) -> RunConfig:
        """All its settings but the directory."""
        return compose("grpo_code", self._settings)

    def launch(self) -> list[Row]:
        """Make the run and return a row per step. Raises SystemExit if it fails."""
        rows = launched(["conf=grpo_code", *self._settings], kept=_KEPT)
        return [{"samples": row["step"] * SAMPLES_PER_STEP} | row for row in rows]
