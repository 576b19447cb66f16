"""Orders of prompts compared (data.order), and groups that two steps use: samples to a result, and
groups with a gradient.

Run: `python -m benchmarks.learning.selection run [--tasks ...] [--orders ...] [--seeds ...]`, as
often as needed: a run that is recorded in benchmarks/results/selection.jsonl is not repeated; then
`report`. Tasks: `embedded`, conf=grpo_code in one process at the exact age 1, 70 CPU seconds a run;
`real`, conf=real launched, 5 to 10 minutes on two cores; `reasoning`, SmolLM2-135M launched on
three generators of reasoning_gym 0.1.25, about 15 minutes. The last two need the model of
`make real`, `reasoning` also `uv pip install reasoning_gym==0.1.25` or the package in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.buffer.policies import Selection
from async_rl.buffer.store.ledger import reading
from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.types import Group
from async_rl.data.model_files import prepare_model
from benchmarks.comparing import mean_and_error
from benchmarks.figures import figure
from benchmarks.learning.bench import Bench
from benchmarks.learning.launched import launched
from benchmarks.learning.staleness_cell import run_cell, samples_to
from benchmarks.study import RESULTS, Recorded, Row, refuse_mixing

FILE = RESULTS / "selection.jsonl"
_SMALL = {"buffer.groups_per_step": 8, "num_steps": 120, "evaluation.every_steps": 10}
ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"data.order": "shuffled"},
    "priority": {"data.order": "priority"},
    "pools": {"data.order": "pools"},
    # The same samples in twice as many steps.
    "8 groups": _SMALL,
    # Each group in two of them.
    "8 groups twice": _SMALL
    | {
        "buffer.uses_per_group": 2,
        "buffer.age_rule": "drop",
        "buffer.max_staleness_versions": 2,
    },
}
GOALS = {"embedded": 0.80, "real": 0.60, "reasoning": 0.20}
"""Held-out pass rates."""
_EMBEDDED = {
    "num_steps": 60,
    "buffer.age_rule": "exact",
    "buffer.max_staleness_versions": 1,
    "evaluation.every_steps": 5,
    "reward.stop_on": [],
}
_LAUNCHED = {"num_steps": 40, "evaluation.every_steps": 10, "checkpoint.every_steps": 0}
_REASONING = (
    "reward.terms.right=async_rl.adapters.reasoning_gym:score",
    "data.max_prompt_tokens=160",
    "evaluation.num_prompts=120",
)
_GENERATORS = {
    "letter_counting": ("max_words=5",),
    "basic_arithmetic": ("max_terms=2",),
    "countdown": ("min_numbers=3", "max_numbers=3"),
}
_KEPT = ("step", "eval/pass_at_1", "reward/mean")
_TRAINED = (
    'SELECT train_version + 1, rewards AS "rewards [stored_json]" FROM groups WHERE'
    " state='trained'"
)
_OF_A_RUN = {"seed", "data.train_files", "data.val_files", "output_dir"}
_OF_AN_ORDER = {path for settings in ORDERS.values() for path in settings}


class SelectingBench(Bench):
    """A bench whose batches have the prompts that data.order chooses, from the groups that a run at
    this age has complete at that time.
    """

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self._rule: Selection | None = None
        self._active: deque[list[Group]] = deque()
        self.shares: list[float] = []

    def begin(self, config: RunConfig) -> None:
        """Forget earlier results."""
        self._prompts.clear()
        self._rule = Selection(config, self.prompts(config)) if config.data.selects else None
        self._active.clear()
        self.shares.clear()

    def batch(self, config: RunConfig, *, number: int, version: int) -> list[Group]:
        """As `Bench.batch`."""
        if self._rule is not None:
            if len(self._active) > config.buffer.max_staleness_versions:
                for group in self._active.popleft():
                    self._rule.note(group.group_id, _rewards(group))
            self._rule.before(number * config.buffer.groups_per_step)
        groups = super().batch(config, number=number, version=version)
        self._active.append(groups)
        self.shares.append(statistics.fmean(len(set(_rewards(group))) > 1 for group in groups))
        return groups


def _rewards(group: Group) -> list[float]:
    return [each.score.reward for each in group.trajectories]


def place(task: str, order: str, seed: int) -> Recorded:
    """Return the place of a run in the study."""
    return Recorded(FILE, f"{task}-{order}-seed{seed}")


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{path}={value}" for path, value in settings.items()]


def embedded(bench: SelectingBench, order: str, seed: int) -> None:
    """Make one run in this process and record it."""
    config = compose("grpo_code", _words({"seed": seed} | _EMBEDDED | ORDERS[order]))
    bench.begin(config)
    rows = run_cell(bench, config, all_steps=True)
    for row in rows:
        first = max(row["step"] - config.evaluation.every_steps, 0)
        shares = bench.shares[first : row["step"]]
        row["gradient"] = statistics.fmean(shares) if shares else None
    place("embedded", order, seed).write(rows, config=config)
    figure(f"embedded, {order}, seed {seed}: final", rows[-1]["eval/pass_at_1"], "1")


def launch(task: str, order: str, seed: int, files: Sequence[str]) -> None:
    """Launch one run and record its evaluations."""
    words = [*_words({"seed": seed} | _LAUNCHED | ORDERS[order]), *files]
    shares: dict[int, list[bool]] = defaultdict(list)

    def look(run_dir: Path) -> None:
        with reading(run_dir) as store:
            for step, rewards in store.execute(_TRAINED):
                shares[step].append(len(set(rewards)) > 1)

    config = compose("real", words)
    size = config.buffer.groups_per_step * config.generation.group_size
    rows = launched(["conf=real", *words], kept=_KEPT, look=look)
    found = [row for row in rows if "eval/pass_at_1" in row]
    steps = [row["step"] for row in found]
    for row, before in zip(found, [-1, *steps], strict=False):
        row["samples"] = row["step"] * size
        trained = [is_one for step in range(before + 1, row["step"] + 1) for is_one in shares[step]]
        row["gradient"] = statistics.fmean(trained) if trained else None
    place(task, order, seed).write(found, config=config)
    figure(f"{task}, {order}, seed {seed}: final", found[-1]["eval/pass_at_1"], "1")


def reasoning_files(directory: Path) -> list[str]:
    """Write the rows of three generators, and return the settings of a run on them."""
    settings = []
    for kind, number, seed in (("train", 600, 1), ("val", 40, 2)):
        names = []
        for name, sizes in _GENERATORS.items():
            path = directory / f"{kind}_{name}.jsonl"
            command = [sys.executable, "-m", "async_rl.adapters.reasoning_gym", name, str(number)]
            with path.open("w") as file:
                subprocess.run([*command, f"seed={seed}", *sizes], stdout=file, check=True)
            names.append(str(path))
        settings.append(f"data.{kind}_files=[{','.join(names)}]")
    return [*settings, *_REASONING]


def report() -> list[str]:
    """Return the lines of the table. Raises SystemExit if runs of a task have other settings."""
    titles = ("task", "order", "seeds", "samples to", "mean pass rate", "at the end", "gradient")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for task, goal in GOALS.items():
        runs = {
            order: [run for seed in range(5) if (run := place(task, order, seed)).exists()]
            for order in ORDERS
        }
        for made in runs.values():
            refuse_mixing(made, apart_from=_OF_A_RUN)
        every = [run for made in runs.values() for run in made]
        refuse_mixing(every, apart_from=_OF_A_RUN | _OF_AN_ORDER)
        for order, made in runs.items():
            if made:
                cells = _cells([run.rows() for run in made], goal)
                lines.append(f"| {task} | `{order}` | {len(made)} | {' | '.join(cells)} |")
    return lines


def _cells(runs: Sequence[Sequence[Row]], goal: float) -> list[str]:
    needed = [found for rows in runs if (found := samples_to(goal, rows)) is not None]
    samples = f"{goal}: never in {len(runs)}"
    if needed:
        samples = f"{goal}: {_spread(needed, 0)} ({len(needed)} of {len(runs)})"
    columns: list[Callable[[Sequence[Row]], float]] = [
        lambda rows: statistics.fmean(row["eval/pass_at_1"] for row in rows),
        lambda rows: statistics.fmean(row["eval/pass_at_1"] for row in rows[-3:]),
        lambda rows: statistics.fmean(row["gradient"] for row in rows[1:]),
    ]
    return [samples, *(_spread([column(rows) for rows in runs], 3) for column in columns)]


def _spread(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f} +- {error:.{digits}f}"


def main() -> None:
    """Make the runs that are missing, or report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("run", "report"))
    parser.add_argument("--tasks", nargs="+", default=list(GOALS), choices=list(GOALS))
    parser.add_argument("--orders", nargs="+", default=["shuffled", "priority"], choices=ORDERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    given = parser.parse_args()
    if given.part == "report":
        print("\n".join(report()))
        return
    missing = [
        (task, order, seed)
        for task in given.tasks
        for seed in given.seeds
        for order in given.orders
        if not place(task, order, seed).exists()
    ]
    model = prepare_model(compose("grpo_code", []), lambda *_: None)
    with tempfile.TemporaryDirectory() as scratch, SelectingBench(model) as bench:
        for task, order, seed in missing:
            if task == "embedded":
                embedded(bench, order, seed)
            else:
                files = reasoning_files(Path(scratch)) if task == "reasoning" else []
                launch(task, order, seed, files)


if __name__ == "__main__":
    main()
