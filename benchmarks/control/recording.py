"""Measure what recording=times and recording=full cost: processor time per step, and disk space.

Run: `python -m benchmarks.control.recording`. Runs of the product's buffer, store and rollouts over
an engine, a learner and scoring that take no time (timed_run.py), with recording=off, times and
full in turns in this process. Only processor time is compared, and the median over the turns, so
that other load of the machine matters little. Steps of 16 groups of 8, a checkpoint every 4 steps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from async_rl.composition.compose import compose_unchecked
from benchmarks.control.timed_device import Device
from benchmarks.control.timed_run import play
from benchmarks.figures import figure

MODES = ("off", "times", "full")
SETTINGS = (
    "generation.group_size=8",
    "buffer.groups_per_step=16",
    "generation.max_concurrent_groups=16",
    "data.max_response_tokens=48",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=4",
)
AT_ONCE = Device(engine_s=1e-4, sample_s=0.0, loss_s=0.0, reward_s=0.0)
STEP_S = 0.9
"""A step of the embedded task on two cores (docs/replay.md); steps of larger models are longer."""


def measure(mode: str, steps: int, run_dir: Path) -> tuple[float, float]:
    """Return the processor seconds and the bytes on disk, per step."""
    words = [*SETTINGS, f"recording={mode}", f"num_steps={steps}"]
    config = compose_unchecked("grpo_code", words)
    began_s = time.process_time()
    asyncio.run(play(config, run_dir, AT_ONCE))
    seconds = time.process_time() - began_s
    size_bytes = sum(file.stat().st_size for file in run_dir.glob("store.sqlite*"))
    return seconds / steps, size_bytes / steps


def main() -> None:
    """Run the modes in turns and print their costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    sizes: dict[str, float] = {}
    for number in range(given.rounds + 1):
        # Another mode starts each round, because the first run after a pause is slower.
        for turn in range(len(MODES)):
            mode = MODES[(number + turn) % len(MODES)]
            with tempfile.TemporaryDirectory() as scratch:
                cost_s, sizes[mode] = measure(mode, given.steps, Path(scratch, "run"))
            if number:  # the first round loads modules
                seconds[mode].append(cost_s)
    off = seconds["off"]
    for mode in MODES:
        figure(f"recording={mode}", 1000 * statistics.median(seconds[mode]), "ms of CPU per step")
        figure(f"recording={mode}", sizes[mode] / 1e3, "kB on disk per step")
    for mode in MODES[1:]:
        differences = [one - other for one, other in zip(seconds[mode], off, strict=True)]
        middle = statistics.median(differences)
        spread = statistics.stdev(differences) / len(differences) ** 0.5
        share = 100 * middle / STEP_S
        figure(f"{mode} compared with off, of a step of {STEP_S} s", share, "percent", goal="2")
        figure(f"{mode}: standard error of it", 100 * spread / STEP_S, "percent")


if __name__ == "__main__":
    main()
