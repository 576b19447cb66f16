"""Reference curves: how each configuration of conf/ learns, with seeds and its full settings.

Run: `python -m benchmarks.learning.reference run [--confs ...] [--seeds ...] [--limit-s N]`, as
often as needed: a run that is recorded in benchmarks/results/reference.jsonl, or selection.jsonl
for conf=real, is not repeated; then `report [--docs]`. About two hours on two quiet cores;
conf=real needs the model of `make real`.

A recorded run has its settings and commit, and a row for each evaluation. `band` is where a further
run lies with 99 % probability if the runs of the seeds are normally distributed: mean +- t * s *
sqrt(1 + 1/n). `tests/e2e/test_learning.py` compares its own run with it, and
`tests/learner/test_reference_curves.py` fails if a default on which learning depends has changed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from benchmarks.comparing import mean_and_error, student_t
from benchmarks.figures import figure
from benchmarks.learning import selection
from benchmarks.learning.launched import launched
from benchmarks.study import RESULTS, Recorded, refuse_mixing

ROOT = Path(__file__).resolve().parents[2]
FILE = RESULTS / "reference.jsonl"
PAGE = ROOT / "docs" / "performance.md"
NUM_STEPS = {
    "grpo_code": 60,
    "ppo_code": 80,
    "ppo_math": 80,
    "grpo_code_retry": 60,
    "agent_code": 60,
    "real": 40,
}
"""The steps of a run of each configuration that trains."""
OTHERS = ("base", "serve", "variants")
"""Files of conf/ without a curve: what all configurations share, a service, variants of choices.
"""
NUM_SEEDS = {"grpo_code": 5, "ppo_code": 5, "real": 5}
EVERY = 10
_SECTIONS = ("algorithm", "buffer", "data", "generation", "learner.optimizer", "model", "rollout")
_UNFIXED = ("generation.vllm.", "model.path", "model.dtype")
"""Settings within the sections that follow from the machine."""
_KEPT = ("step", "time_s", "eval/pass_at_1", "reward/mean", "staleness/mean_versions")
_SHARE = 0.99  # of further runs


def command(conf: str, seed: int) -> list[str]:
    """Return the settings of a run."""
    words = [f"conf={conf}", f"seed={seed}", f"num_steps={NUM_STEPS[conf]}"]
    return [*words, f"evaluation.every_steps={EVERY}", "checkpoint.every_steps=0"]


def config_of(conf: str, seed: int) -> RunConfig:
    """Return the configuration of a run as of today."""
    return compose(conf, command(conf, seed)[1:])


def decides_learning(setting: str) -> bool:
    """Whether learning depends on a setting, and the setting on no machine."""
    return setting.startswith(_SECTIONS) and not setting.startswith(_UNFIXED)


def place(conf: str, seed: int) -> Recorded:
    """Return the place of a run. A run of conf=real is one of the study of orders, which compares
    the default order with others.
    """
    if conf == "real":
        return selection.place(conf, "shuffled", seed)
    return Recorded(FILE, f"{conf}-seed{seed}")


def made() -> list[tuple[str, int]]:
    """Return the configuration and seed of every recorded run."""
    return [
        (conf, seed)
        for conf in NUM_STEPS
        for seed in range(NUM_SEEDS.get(conf, 3))
        if place(conf, seed).exists()
    ]


def run(conf: str, seed: int) -> None:
    """Make one run and record it."""
    if conf == "real":
        selection.launch(conf, "shuffled", seed, ())
        return
    rows = launched(command(conf, seed), kept=_KEPT)
    evaluated = [row for row in rows if "eval/pass_at_1" in row]
    place(conf, seed).write(evaluated, config=config_of(conf, seed))
    rate = evaluated[-1]["eval/pass_at_1"]
    figure(f"{conf}, seed {seed}: held out at step {NUM_STEPS[conf]}", rate, "1")


def curves(conf: str) -> dict[int, list[float]]:
    """Return the held-out pass rates of the recorded seeds by step. Raises SystemExit if they were
    made with different settings.
    """
    runs = [place(conf, seed) for other, seed in made() if other == conf]
    settings = {setting for run in runs for setting in run.config()}
    refuse_mixing(runs, apart_from=[path for path in settings if not decides_learning(path)])
    found: dict[int, list[float]] = {}
    for row in itertools.chain(*(run.rows() for run in runs)):
        found.setdefault(row["step"], []).append(row["eval/pass_at_1"])
    return found


def band(conf: str) -> dict[int, tuple[float, float]]:
    """Return for each evaluated step where a further run lies with 99 % probability."""
    return {
        step: (
            statistics.mean(rates) - half_width(rates),
            statistics.mean(rates) + half_width(rates),
        )
        for step, rates in curves(conf).items()
        if len(rates) > 1
    }


def half_width(rates: Sequence[float]) -> float:
    """Return half the width of the interval that holds 99 % of further values."""
    _, error = mean_and_error(rates)
    return student_t(_SHARE, len(rates) - 1) * error * (len(rates) + 1) ** 0.5


def report() -> list[str]:
    """Return the lines of the table."""
    steps = (0, 10, 20, 40, 60, 80)
    lines = [f"| configuration | seeds | {' | '.join(f'step {step}' for step in steps)} |"]
    lines.append("|---" * (len(steps) + 2) + "|")
    for conf in NUM_STEPS:
        found = curves(conf)
        if not found:
            continue
        cells = []
        for step in steps:
            rates = found.get(step, [])
            spread = f" +- {statistics.stdev(rates):.2f}" if len(rates) > 1 else ""
            cells.append(f"{statistics.mean(rates):.2f}{spread}" if rates else "")
        lines.append(f"| `conf={conf}` | {len(found[0])} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Make the runs that are missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("run", "report"))
    parser.add_argument("--confs", nargs="+", default=list(NUM_STEPS), choices=list(NUM_STEPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    began_s = time.monotonic()
    if given.part == "run":
        for conf in given.confs:
            for seed in given.seeds[: NUM_SEEDS.get(conf, 3)]:
                is_late = time.monotonic() - began_s > given.limit_s
                if not is_late and not place(conf, seed).exists():
                    run(conf, seed)
        return
    lines = report()
    print("\n".join(lines))
    if given.docs:
        before, _, rest = PAGE.read_text().partition("<!-- reference: begin -->\n")
        _, _, after = rest.partition("<!-- reference: end -->")
        text = "\n".join(["<!-- reference: begin -->", *lines, "<!-- reference: end -->"])
        PAGE.write_text(f"{before}{text}{after}")


if __name__ == "__main__":
    main()
