"""Measure the worth of the inputs of the critic's head, and of an asymmetric critic.

A cell is a run of conf=ppo_code in this process at age 1 (staleness_cell.py). Its variants:
  without   the weights of the head's inputs stay 0: the critic reads its hidden state alone
  inputs    the product
  group     two more inputs, which the policy does not have: the mean reward of the other members
            of the group, and its product with the share of the length
  lambda    the product with `algorithm.advantage.gae_lambda=0.95`
  lambda without    the same without inputs
All variants of a seed get the same prompts and the same samples of version 0. A row per step has
the share of the returns' variance that the critic explains, in all and by quarter of the response,
of values computed before the step trained on these returns.

"launched without" and "launched inputs" are whole runs with all processes, at the ages that they
have.

Run: `python -m benchmarks.learning.critic run [--variants ...] [--seeds ...]`, which makes the runs
that benchmarks/results/critic.jsonl does not have; `report` prints the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from async_rl.batching.batch import Batch
from async_rl.batching.packing import Pass, pack
from async_rl.composition.compose import compose
from async_rl.config.run import RunConfig
from async_rl.core.types import DoubleArray
from async_rl.data.model_files import prepare_model
from async_rl.learner import forward_passes, models
from async_rl.learner.context import Context, Piece
from async_rl.learner.metrics import Step, explained_variance
from async_rl.learner.trainer import Trainer
from async_rl.runs.metrics import newest_rows
from benchmarks.comparing import mean_and_error, student_t
from benchmarks.figures import figure
from benchmarks.learning.bench import Bench
from benchmarks.learning.staleness_cell import GOAL, run_cell, samples_to
from benchmarks.study import RESULTS, Recorded, Row

FILE = RESULTS / "critic.jsonl"
SEEDS = (0, 1, 2, 3, 4)
COMPARED = {
    "without": "",
    "inputs": "without",
    "group": "inputs",
    "lambda": "inputs",
    "lambda without": "without",
    "launched without": "",
    "launched inputs": "launched without",
}
"""The variants, and what each is compared with."""
QUARTERS = 4
FIXED = (
    "num_steps=50",
    "buffer.age_rule=exact",
    "buffer.max_staleness_versions=1",
    "reward.stop_on=[]",
)
LAUNCHED = ("num_steps=50", "reward.stop_on=[]", "monitoring.tensorboard_port=null")
SAMPLES_PER_STEP = 128
KEPT = ("eval/pass_at_1", "staleness/mean_versions", "reward/mean")
_WITHOUT = """
import sys

def patch():
    import torch
    from async_rl.learner import models

    create = models.ValueHead.__init__

    def without(self, *arguments, **settings):
        create(self, *arguments, **settings)
        self.of_inputs.register_hook(torch.zeros_like)

    models.ValueHead.__init__ = without

# Processes that use no model have None in its place.
if sys.modules.get("torch", patch) is not None:
    patch()
"""


def by_quarter(batch: Batch, step: Step) -> list[float]:
    """Return the share of the returns' variance that the values explain in each quarter."""
    values, returns = step.before.values, step.targets.returns
    assert values is not None
    assert returns is not None
    lengths = torch.tensor(batch.response_lengths)[batch.sequence_index]
    starts = torch.tensor(list(batch.offsets.values()))
    place = torch.arange(batch.num_tokens) - starts[batch.sequence_index]
    quarter = QUARTERS * place // lengths
    units = step.moments.to_returns(values.at_tokens)
    chosen = [step.mask & (quarter == number) for number in range(QUARTERS)]
    return [explained_variance(units[of], returns=returns[of]) for of in chosen]


class Regression:
    """A ridge regression of the returns on columns, fitted on the steps before, which fade."""

    def __init__(self, num_columns: int) -> None:
        self._squares = np.eye(num_columns)
        self._products = np.zeros(num_columns)

    def explained(self, columns: DoubleArray, returns: DoubleArray) -> float:
        """Return the share of the variance that it explains of this step, and learn from it."""
        errors = returns - columns @ np.linalg.solve(self._squares, self._products)
        self._squares = 0.9 * self._squares + columns.T @ columns
        self._products = 0.9 * self._products + columns.T @ returns
        return float(1 - errors.var() / returns.var())


def regressors(batch: Batch, step: Step) -> dict[str, DoubleArray]:
    """Return float64 [R, columns]: the inputs of the head, and with them more of the same kind."""
    row = pack(batch, range(batch.num_sequences), device=torch.device("cpu"))
    assert row.value_inputs is not None
    tokens = row.value_inputs[row.predict_index].double().numpy()
    place = tokens[:, :1] / 64
    inputs = np.concatenate([np.ones_like(place), place, tokens[:, 1:]], axis=1)
    surprise = np.r_[0.0, -batch.behavior_logprobs.double().numpy()[:-1]]
    is_first = tokens[:, 0] == 0
    before = np.where(is_first, 0.0, np.r_[0.0, surprise[:-1]])
    mean = np.expm1(tokens[:, 3:]) / np.maximum(tokens[:, :1], 1)
    entropy = step.before.entropies.double().numpy()[:, None]
    more = [inputs, place**2, before[:, None], mean, place * mean, entropy, place * entropy]
    return {"head": inputs, "more": np.concatenate(more, axis=1)}


def watch(trainer: Trainer, rows: list[Row]) -> None:
    """Add a row per step."""
    updater = trainer._updater
    step_of = updater.step
    regressions: dict[str, Regression] = {}

    def step(batch: Batch, version: int) -> Step:
        result = step_of(batch, version)
        values, returns, mask = result.before.values, result.targets.returns, result.mask
        assert values is not None
        assert returns is not None
        units = result.moments.to_returns(values.at_tokens)
        shares = {}
        for name, columns in regressors(batch, result).items():
            fitted = regressions.setdefault(name, Regression(columns.shape[1]))
            shares[name] = round(fitted.explained(columns, returns.double().numpy()), 4)
        rows.append(
            {
                "step": version + 1,
                "explained": round(explained_variance(units[mask], returns=returns[mask]), 4),
                "quarters": [round(share, 4) for share in by_quarter(batch, result)],
                "regressions": shares,
            }
        )
        return result

    updater.step = step  # type: ignore[method-assign]


class WideHead(models.ValueHead):
    """A value head with two more inputs, which start at 0 too."""

    def __init__(self, *arguments: Any, max_tokens: int) -> None:
        super().__init__(*arguments, max_tokens=max_tokens)
        self._units += [self._units[1], self._units[0]]
        self.of_inputs = nn.Parameter(torch.zeros(1, len(self._units)))


@contextlib.contextmanager
def group_critic() -> Iterator[None]:
    """Give the head the mean reward of the other members of the group, alone and times the place.

    Neither depends on the response itself, so the values stay a baseline without bias.
    """
    batches: list[Batch] = []

    def pack_of(batch: Batch, sequences: Sequence[int], **settings: Any) -> Pass:
        batches[:] = [batch]
        return pack(batch, sequences, **settings)

    def values(
        head: models.ValueHead, hidden: Tensor, piece: Piece, context: Context
    ) -> models.Values:
        row, (batch,) = piece.row, batches
        assert row.value_inputs is not None
        group = batch.group_index
        sums = torch.zeros(batch.num_groups).index_add_(0, group, batch.rewards)
        others = (sums[group] - batch.rewards) / (group.bincount() - 1)[group]
        own = others[torch.cat([batch.sequence_index[row.token_index], row.sequences])]
        index = torch.cat([row.predict_index, row.last_index])
        inputs = row.value_inputs[index]
        wide = torch.cat([inputs, torch.stack([own, own * inputs[:, 0]], 1)], 1)
        found = head(hidden.index_select(0, index), wide).float()
        at_tokens, after_end = found.split([len(row.predict_index), len(row.last_index)])
        return models.Values(at_tokens.clone(), after_end.detach().clone())

    patch = unittest.mock.patch.object
    with (
        patch(models, "ValueHead", WideHead),
        patch(models, "_values", values),
        patch(forward_passes, "pack", pack_of),
    ):
        yield


def run(bench: Bench, variant: str, seed: int) -> tuple[list[Row], RunConfig]:
    """Make one run: a row per step, one per evaluation; return its configuration too."""
    words = [*FIXED, f"seed={seed}"]
    if variant.startswith("lambda"):
        words.append("algorithm.advantage.gae_lambda=0.95")
    config = compose("ppo_code", words)
    rows: list[Row] = []

    def prepare(trainer: Trainer) -> None:
        watch(trainer, rows)
        critic = trainer._models.critic
        assert critic is not None
        if variant.endswith("without"):
            critic.head.of_inputs.register_hook(torch.zeros_like)

    with group_critic() if variant == "group" else contextlib.nullcontext():
        evaluations = run_cell(bench, config, all_steps=True, prepare=prepare)
    return rows + evaluations, config


def launch(variant: str, seed: int, scratch: Path) -> tuple[list[Row], RunConfig]:
    """Make a launched run of the variant; return as `run`."""
    words = [*LAUNCHED, f"seed={seed}"]
    if variant.endswith("without"):
        # The learner imports it before it loads its models.
        (scratch / "without.py").write_text(_WITHOUT)
        words.append("model.external_lib=without")
    config = compose("ppo_code", words)
    command = [sys.executable, "-m", "async_rl.launchers.cli", "launch", "conf=ppo_code", *words]
    path = os.pathsep.join([str(scratch), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [*command, f"output_dir={scratch}", "run_name=run"],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    return [launched_row(row) for row in newest_rows(scratch / "run", 0).values()], config


def launched_row(row: Mapping[str, Any]) -> Row:
    """Return a row of a launched run in the names of `run`."""
    step = int(row["step"])
    kept: Row = {"step": step, "samples": step * SAMPLES_PER_STEP}
    kept |= {name: row[name] for name in KEPT if name in row}
    if "value/explained_variance" in row:
        kept["explained"] = row["value/explained_variance"]
    return kept


def recorded_run(variant: str, seed: int) -> Recorded:
    """Return the place of a run in the study."""
    return Recorded(FILE, f"{variant}-seed{seed}")


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Return samples to the goal, the mean of the held-out pass rates, and the mean shares of the
    returns' variance that the critic explains: in all, and in each quarter.
    """
    steps = [row for row in rows if "explained" in row]
    evaluations = [row for row in rows if "eval/pass_at_1" in row]
    # A regression needs some steps before.
    later = [row for row in steps[5:] if "regressions" in row]
    samples = samples_to(GOAL, evaluations)
    watched = [row["quarters"] for row in steps if "quarters" in row]
    shares = [statistics.fmean(of) for of in zip(*watched, strict=True)]
    return {
        "samples": float("nan") if samples is None else samples,
        "mean pass@1": statistics.fmean(row["eval/pass_at_1"] for row in evaluations),
        "explained": statistics.fmean(row["explained"] for row in steps),
        **{f"quarter {q + 1}": share for q, share in enumerate(shares)},
        **{
            f"regression on {name}": statistics.fmean(row["regressions"][name] for row in later)
            for name in (later[0]["regressions"] if later else ())
        },
    }


def interval(differences: Sequence[float]) -> str:
    """Return the mean and its 95 % interval by Student's t."""
    mean, error = mean_and_error(differences)
    return f"{mean:.3f} +- {student_t(0.95, len(differences) - 1) * error:.3f}"


def report() -> None:
    """Print the mean of each variant, and its paired differences to another one, over the seeds
    that both have.
    """
    found = {
        variant: {
            seed: figures_of(recorded_run(variant, seed).rows())
            for seed in SEEDS
            if recorded_run(variant, seed).exists()
        }
        for variant in COMPARED
    }
    for variant, base in COMPARED.items():
        runs = found[variant]
        for name in dict.fromkeys(itertools.chain(*runs.values())):
            known = [run[name] for run in runs.values() if name in run]
            figure(f"{variant}: {name}, {len(known)} seeds", statistics.fmean(known), "")
            others = found.get(base, {})
            both = [s for s in runs if name in runs[s] and name in others.get(s, {})]
            pairs = [(runs[s][name], others[s][name]) for s in both]
            if len(pairs) > 1:
                print(f"  minus {base}: {interval([a - b for a, b in pairs])}, {len(pairs)} seeds")


def main() -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--variants", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    given = parser.parse_args()
    if given.command == "report":
        report()
        return
    with Bench(prepare_model(compose("grpo_code", []), lambda *_: None)) as bench:
        for seed in given.seeds:
            # The order alternates, so that a busy machine disturbs no variant more than another.
            for variant in given.variants[:: 1 if seed % 2 == 0 else -1]:
                place = recorded_run(variant, seed)
                if place.exists():
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    if variant.startswith("launched"):
                        rows, config = launch(variant, seed, Path(scratch))
                    else:
                        rows, config = run(bench, variant, seed)
                place.write(rows, config=config)
                print(place.name, figures_of(place.rows()), flush=True)


if __name__ == "__main__":
    main()
