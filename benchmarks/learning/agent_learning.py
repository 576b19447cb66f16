"""Show that `conf=agent_code` learns: an agent with a Python tool, written against plain `openai`.

Each seed is one run of the configuration as it is, or its first steps (`--until`). The rows of its
evaluations are recorded in benchmarks/results/agent_code.jsonl; a recorded seed is not repeated.
benchmarks/faults/chaos_agents.py records a run whose processes it kills as `killed`.

Run: `python -m benchmarks.learning.agent_learning run [--seeds 0 1 2]`, then
`python -m benchmarks.learning.agent_learning report`, which prints the figures and draws PICTURE.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import figure
from benchmarks.study import RESULTS, Recorded, Row, recorded

ROOT = Path(__file__).parents[2]
FILE = RESULTS / "agent_code.jsonl"
PICTURE = ROOT / "docs" / "images" / "agent_code.png"
KILLED = Recorded(FILE, "killed")
GOAL = 0.80
SAMPLES_PER_STEP = 128
_KEPT = (
    "eval/pass_at_1",
    "eval/pass_at_1_error",
    "reward/mean",
    "sessions/turns",
    "staleness/max_versions",
    "time_s",
)


def launch(seed: int, until: int, extra: Sequence[str]) -> list[Row]:
    """Return the rows of one run, which is stopped after the evaluation of the step `until`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            str(Path(sys.executable).with_name("async-rl")),
            *("launch", "conf=agent_code", f"seed={seed}", "monitoring.tensorboard_port=null"),
            *(f"output_dir={scratch}", "run_name=run", *extra),
        ]
        run_dir = Path(scratch) / "run"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while process.poll() is None and not is_evaluated(run_dir, until):
                time.sleep(1)
        finally:
            process.terminate()
            process.wait(90)
        return read_rows(run_dir)


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Return whether the run has recorded its evaluation of a step."""
    # Later steps may be recorded before the evaluation is.
    return any(row["step"] >= step and "eval/pass_at_1" in row for row in read_rows(run_dir))


def read_rows(run_dir: Path) -> list[Row]:
    """Return the rows that a run has recorded so far."""
    path = run_dir / "metrics.jsonl"
    # The last line may be half written.
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def evaluated(rows: Sequence[Row]) -> list[Row]:
    """Return the columns of the page, for the rows with an evaluation."""
    found = []
    for row in rows:
        if "eval/pass_at_1" in row:
            samples = row["step"] * SAMPLES_PER_STEP
            kept = {key: round(row[key], 4) for key in _KEPT if key in row}
            found.append({"step": row["step"], "samples": samples, **kept})
    return found


def report() -> None:
    """Print the figures of every recorded run, and draw its curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axis = pyplot.subplots(figsize=(6, 3.5))
    axis.axhline(GOAL, color="grey", linewidth=0.5)
    for name, rows in recorded(FILE).items():
        rates = [row["eval/pass_at_1"] for row in rows]
        style = "--" if name == KILLED.name else "-"
        label = "seed 0, 20 kills" if name == KILLED.name else name.replace("d", "d ")
        axis.plot([row["samples"] for row in rows], rates, style, label=label)
        reached = [row for row in rows if row["eval/pass_at_1"] >= GOAL]
        figure(f"{name}: held-out pass@1 at step 0", rates[0], "share")
        if reached:
            figure(f"{name}: steps to {GOAL:.2f}", reached[0]["step"], "steps")
            figure(f"{name}: samples to {GOAL:.2f}", reached[0]["samples"], "samples")
        figure(f"{name}: held-out pass@1, last three", sum(rates[-3:]) / 3, "share")
    axis.set_xlabel("samples trained")
    axis.set_ylabel("held-out pass@1")
    axis.legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(PICTURE, dpi=80)


def main() -> None:
    """Run the seeds that are not recorded, or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--until", type=int, default=60, help="stop after this step's evaluation")
    parser.add_argument("settings", nargs="*", help="settings of every run, after --")
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    for seed in given.seeds:
        run = Recorded(FILE, f"seed{seed}")
        if not run.exists():
            run.write(evaluated(launch(seed, given.until, given.settings)))


if __name__ == "__main__":
    main()
