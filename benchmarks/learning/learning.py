"""Measure the training time of conf=ppo_code and conf=grpo_code to a held-out pass rate of 0.80.

The pass rate is at temperature 1; each configuration runs with three seeds. Training time starts
with the first step (including the wait for its batch) and stops with the step whose weights first
reached 0.80. Start-up is reported separately: from the command to the first optimizer step, with
the embedded model in the cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import figure

GOAL = 0.80
LIMIT_S = {"grpo_code": 60, "ppo_code": 180}
NUM_STEPS = {"grpo_code": 70, "ppo_code": 110}


def learn(conf: str, seed: int, extra: list[str]) -> list[dict[str, Any]]:
    """Return the rows of one run, which is stopped once it reaches the goal twice in a row."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            str(Path(sys.executable).with_name("async-rl")),
            "launch",
            f"conf={conf}",
            f"seed={seed}",
            f"num_steps={NUM_STEPS[conf]}",
        ]
        command += [
            f"output_dir={scratch}",
            "run_name=run",
            "monitoring.tensorboard_port=null",
            *extra,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        path = Path(scratch) / "run" / "metrics.jsonl"
        try:
            while process.poll() is None and not is_reached(read(path)):
                time.sleep(0.2)
        finally:
            process.terminate()
            process.wait(90)
        return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows so far."""
    return (
        [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    )


def curve(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the held-out pass rate by step."""
    return {row["step"]: row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row}


def is_reached(rows: list[dict[str, Any]]) -> bool:
    """Return whether two evaluations in a row reach the goal."""
    rates = list(curve(rows).values())
    return len(rates) >= 2 and min(rates[-2:]) >= GOAL


def main() -> None:
    """Run all seeds and print the curves and the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--confs", nargs="+", default=["grpo_code", "ppo_code"], choices=list(LIMIT_S)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("extra", nargs="*")
    arguments = parser.parse_args()
    for conf in arguments.confs:
        for seed in arguments.seeds:
            rows = learn(conf, seed, arguments.extra)
            by_step = {row["step"]: row for row in rows}
            begin_s = by_step[1]["time_s"] - by_step[1]["time/step_s"]
            rates = curve(rows)
            points = [
                f"{step}:{rate:.2f}@{by_step[step]['time_s'] - begin_s:.0f}s"
                for step, rate in rates.items()
                if step
            ]
            print(f"{conf} seed {seed}: 0:{rates[0]:.2f}  {'  '.join(points)}")
            first = next((step for step, rate in rates.items() if rate >= GOAL), None)
            trained_s = by_step[first]["time_s"] - begin_s if first else float("nan")
            figure(
                f"{conf}, seed {seed}: training to {GOAL:.2f} held-out",
                trained_s,
                "s",
                goal=f"at most {LIMIT_S[conf]}",
            )
            figure(
                f"{conf}, seed {seed}: command to first optimizer step",
                by_step[1]["time_s"],
                "s",
                goal="at most 60",
            )
            stale = max(row["staleness/max_versions"] for row in rows if row["step"])
            figure(f"{conf}, seed {seed}: largest staleness", stale, "versions", goal="at most 2")


if __name__ == "__main__":
    main()
