"""Reference curves: how each configuration of conf/ learns, with seeds and its full settings.

Run: `python -m benchmarks.learning.reference run [--confs ...] [--seeds ...] [--limit-s N]`, as
often as needed: a run that is recorded in benchmarks/results/reference.jsonl is not repeated; then
`report [--docs]`. About two hours on two quiet cores. conf=real needs the model of `make real`.

A recorded run has its settings and commit, and a row for each evaluation. `band` is where a further
run lies with 99 % probability if the runs of the seeds are normally distributed: mean +- t * s *
sqrt(1 + 1/n). `tests/e2e/test_learning.py` compares its own run with it, and
`tests/learner/test_reference_curves.py` fails if a default on which learning depends has changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.composition.compose import compose
from async_rl.config.base import as_builtins
from benchmarks.figures import figure
from benchmarks.study import RESULTS, Recorded, recorded

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
NUM_SEEDS = {"grpo_code": 5, "ppo_code": 5}
EVERY = 10
SECTIONS = ("algorithm", "buffer", "data", "generation", "learner.optimizer", "model", "rollout")
"""The settings on which learning depends."""
_UNFIXED = ("generation.vllm.", "model.path", "model.dtype")
"""Settings within them that follow from the machine."""
_KEPT = ("step", "time_s", "eval/pass_at_1", "reward/mean", "staleness/mean_versions")
# Two-sided 99 % of Student's t by degrees of freedom.
_T = {1: 63.66, 2: 9.92, 3: 5.84, 4: 4.60}


def command(conf: str, seed: int) -> list[str]:
    """Return the settings of a run."""
    words = [f"conf={conf}", f"seed={seed}", f"num_steps={NUM_STEPS[conf]}"]
    return [*words, f"evaluation.every_steps={EVERY}", "checkpoint.every_steps=0"]


def learning_settings(conf: str) -> dict[str, Any]:
    """Return the settings of today on which the learning of a configuration depends, by path."""
    plain = as_builtins(compose(conf, command(conf, 0)[2:]))
    # As a recorded run has them: tuples are lists there.
    flat = json.loads(json.dumps(dict(_flat(plain))))
    return {
        path: value
        for path, value in flat.items()
        if path.startswith(SECTIONS) and not path.startswith(_UNFIXED)
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def run(conf: str, seed: int) -> None:
    """Make one run and record it."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [str(Path(sys.executable).with_name("async-rl")), "launch", *command(conf, seed)]
        words += [f"output_dir={scratch}", "run_name=run", "monitoring.tensorboard_port=null"]
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        if done.returncode:
            raise SystemExit(f"{conf}, seed {seed}: exit code {done.returncode}\n{done.stdout}")
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [{key: row[key] for key in _KEPT if key in row} for row in map(json.loads, lines)]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    made = {"commit": commit, "command": command(conf, seed), "settings": learning_settings(conf)}
    evaluated = [row for row in rows if "eval/pass_at_1" in row]
    Recorded(FILE, f"{conf} {seed}").write([made, *evaluated])
    figure(f"{conf}, seed {seed}: held out at step {NUM_STEPS[conf]}", last(evaluated), "1")


def last(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the last held-out pass rate of a run."""
    return float(rows[-1]["eval/pass_at_1"])


def curves(conf: str) -> dict[int, list[float]]:
    """Return the held-out pass rates of the recorded seeds by step. Raises ValueError if they were
    made with different settings.
    """
    found: dict[int, list[float]] = {}
    settings: dict[str, Any] = {}
    for name, (made, *rows) in recorded(FILE).items():
        if name.split()[0] != conf:
            continue
        differing = differences(made["settings"], settings or made["settings"])
        if differing:
            raise ValueError(f"{name} was made with other settings than its seeds: {differing}")
        settings = made["settings"]
        for row in rows:
            found.setdefault(row["step"], []).append(row["eval/pass_at_1"])
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the paths of settings that differ."""
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))


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
    """Return half the width of the interval in which a further value lies with 99 %."""
    number = len(rates)
    return float(_T[min(number - 1, 4)] * statistics.stdev(rates) * (1 + 1 / number) ** 0.5)


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
                if not is_late and not Recorded(FILE, f"{conf} {seed}").exists():
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
