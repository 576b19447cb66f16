"""Whole runs of the default objective with each of the two rates, as a user launches them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
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
            "monitoring.tensorboard_port=null",
        ]

    @property
    def config(self) -> RunConfig:
        """All its settings but the directory."""
        return compose("grpo_code", self._settings)

    def launch(self) -> list[Row]:
        """Make the run and return a row per step. Raises SystemExit if it fails."""
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                str(Path(sys.executable).with_name("async-rl")),
                "launch",
                "conf=grpo_code",
                *self._settings,
                f"output_dir={scratch}",
                "run_name=run",
            ]
            done = subprocess.run(command, stdout=subprocess.DEVNULL)
            if done.returncode:
                raise SystemExit(f"{self.recorded.name}: exit code {done.returncode} of {command}")
            lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            {"samples": row["step"] * SAMPLES_PER_STEP}
            | {name: row[name] for name in _KEPT if name in row}
            for row in rows
        ]
