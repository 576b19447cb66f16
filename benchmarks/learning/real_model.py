"""Train the pretrained model of `make real` with three seeds, all weights and LoRA, and draw the
curves; train it on data of an exact age too.

Run: `python -m benchmarks.learning.real_model run [--ways full lora] [--seeds 0 1 2]`, about eight
minutes of both cores for each; then `python -m benchmarks.learning.real_model report`, which writes
the table of docs/tutorials/real_model.md, prints the one of exact ages and draws the pictures from
the rows in benchmarks/results/real_model.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import figure, with_table
from benchmarks.study import RESULTS, Recorded, recorded

ROOT = Path(__file__).resolve().parents[2]
FILE = RESULTS / "real_model.jsonl"
PAGE = ROOT / "docs" / "tutorials" / "real_model.md"
IMAGES = ROOT / "docs" / "images"
SHARE = "policy/effective_sequences"


def _exactly(age: int) -> list[str]:
    """Return the settings under which every batch is `age` versions old."""
    return [
        "buffer.age_rule=exact",
        f"buffer.max_staleness_versions={age}",
        # An exact age makes both sides wait for each other, so they need no handovers.
        "placement=disaggregated",
        "generators.cores=[]",
        "learner.cores=[]",
    ]


def _grpo(lr: str) -> list[str]:
    return [f"learner.optimizer.lr={lr}"]


def _gspo(lr: str) -> list[str]:
    return ["algorithm=gspo", f"learner.optimizer.lr={lr}"]


WAYS = {
    "full": ("`grpo`, all weights, 2e-5", []),
    "lora": ("LoRA of rank 16, 2e-4", ["model.lora=lora", "learner.optimizer.lr=2e-4"]),
    "gspo-4e-5": ("`gspo`, all weights, 4e-5 falling", _gspo("4e-5")),
    "grpo-age8": ("`grpo`, 2e-5, exact age 8", _exactly(8)),
    "gspo-age8-4e-5": ("`gspo`, 4e-5 falling, exact age 8", [*_exactly(8), *_gspo("4e-5")]),
    "grpo-age16": ("`grpo`, 2e-5, exact age 16", _exactly(16)),
    "grpo-age16-1e-5": ("`grpo`, 1e-5, exact age 16", [*_exactly(16), *_grpo("1e-5")]),
    "gspo-age16": ("`gspo`, 1e-5 falling, exact age 16", [*_exactly(16), *_gspo("1e-5")]),
    "gspo-age16-2e-5": ("`gspo`, 2e-5 falling, exact age 16", [*_exactly(16), *_gspo("2e-5")]),
    "gspo-age16-4e-5": ("`gspo`, 4e-5 falling, exact age 16", [*_exactly(16), *_gspo("4e-5")]),
}
"""How a model is trained: its name in the table, its settings."""
QUIET = ("full", "lora", "gspo-4e-5")
"""Their seconds are shown; other runs shared the cores with other work."""
KEPT = (
    "eval/pass_at_1",
    "reward/mean",
    "time/step_s",
    "time/update_s",
    "time/wait_batch_s",
    "weights/push_s",
    "weights/pause_s",
    "staleness/mean_versions",
    SHARE,
    "tokens/trained",
    "memory/learner_mb_max",
    "memory/generators_mb_max",
)
GOAL = 0.60
_SHOWN_LINES = 40

Row = dict[str, float]


def train(way: str, seed: int) -> None:
    """Train once, and keep the rows."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [str(Path(sys.executable).with_name("async-rl")), "launch", "conf=real"]
        command += [f"seed={seed}", f"output_dir={scratch}", "run_name=run", *WAYS[way][1]]
        command += ["monitoring.tensorboard_port=null", "checkpoint.every_steps=0"]
        # As the recorded runs; conf=real takes bfloat16 on a GPU.
        command += ["model.dtype=float32"]
        started_s = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
        if done.returncode:
            said = b"\n".join(done.stdout.splitlines()[-_SHOWN_LINES:]).decode()
            raise SystemExit(f"{way}, seed {seed}: exit code {done.returncode}\n{said}")
        passed_s = time.monotonic() - started_s
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    shown = []
    for row in rows:
        kept = {key: round(row[key], 4) for key in KEPT if key in row}
        shown.append({"step": row["step"], "time_s": row["time_s"], **kept})
    Recorded(FILE, f"{way}-seed{seed}").write(shown)
    figure(f"real model, {way}, seed {seed}: command to end", passed_s, "s")


def runs(way: str) -> list[list[Row]]:
    """Return the rows of the runs that exist, by seed."""
    return [rows for name, rows in recorded(FILE).items() if name.rpartition("-seed")[0] == way]


def held_out(rows: Sequence[Row]) -> dict[int, float]:
    """Return the held-out pass rate by step."""
    return {int(row["step"]): row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row}


def seconds_to(rows: Sequence[Row], goal: float) -> float:
    """Return the seconds from the first step to the goal: the sum of the steps."""
    spent_s = 0.0
    for row in rows:
        spent_s += row.get("time/step_s", 0.0)
        if row.get("eval/pass_at_1", 0.0) >= goal:
            return spent_s
    return float("nan")


def spread(values: Sequence[float], form: str) -> str:
    """Return the values, first to last seed."""
    return ", ".join(format(value, form) for value in values)


def mean(found: Sequence[Sequence[Row]], key: str) -> float:
    """Return the mean over all steps of all runs."""
    return statistics.fmean(row[key] for rows in found for row in rows if key in row)


def table() -> str:
    """Return the table of all runs."""
    lines = [
        f"| trained | seeds | held out, step 0 | step 20 | step 40 | last step | seconds to {GOAL}"
        " | seconds per step: all; training, waiting for a batch | push; pause of generation"
        " | peak of the learner |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for way in QUIET:
        name, found = WAYS[way][0], runs(way)
        curves = [held_out(rows) for rows in found]
        points = [
            spread([curve.get(step, float("nan")) for curve in curves], ".2f")
            for step in (0, 20, 40)
        ]
        last = spread([curve[max(curve)] for curve in curves], ".2f")
        until = spread([seconds_to(rows, GOAL) for rows in found], ".0f")
        stages = [mean(found, f"time/{stage}_s") for stage in ("step", "update", "wait_batch")]
        push = [1000 * mean(found, f"weights/{part}_s") for part in ("push", "pause")]
        cells = [name, str(len(found)), *points, last, until]
        cells.append(f"{stages[0]:.1f}; {stages[1]:.1f}, {stages[2]:.1f}")
        cells.append(f"{push[0]:.0f} ms; {push[1]:.0f} ms")
        learner_mb = max(r.get("memory/learner_mb_max", 0) for rows in found for r in rows)
        cells.append(f"{learner_mb / 1024:.1f} GB")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_ages() -> str:
    """Return the table of the runs at exact ages, a row for each."""
    lines = [
        "| run | held-out, every 10 steps from 0 | effective sequences |",
        "|---|---|---|",
    ]
    for way, (name, _) in WAYS.items():
        if way == "lora":
            continue
        for rows in runs(way):
            curve = list(held_out(rows).values())
            shares = [row[SHARE] for row in rows if row["step"] % 10 == 0 and SHARE in row]
            lines.append(f"| {name} | {spread(curve, '.2f')} | {spread(shares, '.2f')} |")
    return "\n".join(lines)


def draw(ways: Sequence[str], picture: Path) -> None:
    """Draw the held-out pass rate and the reward of each run by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for color, way in enumerate(ways):
        for number, rows in enumerate(runs(way)):
            label = WAYS[way][0].replace("`", "") if number == 0 else None
            curve = held_out(rows)
            axes[0].plot(list(curve), list(curve.values()), color=f"C{color}", label=label)
            steps = [row["step"] for row in rows if "reward/mean" in row]
            rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
            smooth = [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(steps))]
            axes[1].plot(steps, smooth, color=f"C{color}")
    axes[0].set(xlabel="step", ylabel="held-out pass rate")
    axes[1].set(xlabel="step", ylabel="reward, mean of five steps")
    axes[0].legend(loc="lower right", fontsize=7)
    drawn.tight_layout()
    drawn.savefig(picture, dpi=110)


def report() -> None:
    """Write the table of the page and the pictures, and print the table of ages."""
    PAGE.write_text(with_table(PAGE.read_text(), "runs", table() + "\n"))
    print(table_of_ages())
    draw(QUIET, IMAGES / "real_model.png")
    draw([way for way in WAYS if "-age" in way], IMAGES / "real_model_ages.png")


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--ways", nargs="+", default=["full", "lora"], choices=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    if given.what == "report":
        report()
        return
    for seed in given.seeds:
        for way in given.ways:
            if not Recorded(FILE, f"{way}-seed{seed}").exists():
                train(way, seed)


if __name__ == "__main__":
    main()
