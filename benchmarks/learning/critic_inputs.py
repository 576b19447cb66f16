"""Measure what a critic could explain of the returns from the log-probs of the policy alone.

A ridge regression predicts the reward of a response at each of its tokens from the position and
from the surprise of the tokens before it: its mean, its maximum, and the last two. It is fitted on
half of the prompts and judged on the other half, both ways. The share of the returns' variance that
it explains is printed by quarter of the response, next to the critic's own share in the metrics of
the same steps (value/explained_variance).

Run: `python -m benchmarks.learning.critic_inputs RUN...`, runs with stored trajectories, such as
those of `conf=ppo_code recording=full`.
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.trajectories import rollouts
from async_rl.core.types import DoubleArray, Trajectory
from async_rl.runs.metrics import newest_rows
from benchmarks.figures import figure

QUARTERS = 4
RIDGE = 1.0
MOST_GROUPS = 4000


def features(logprobs: DoubleArray) -> DoubleArray:
    """Return float64 [L, 7] of the response tokens: each row knows the tokens before its own."""
    surprise = np.concatenate([[0.0, 0.0], -logprobs])[:-1]
    number = np.arange(1, len(surprise))
    mean = np.cumsum(surprise[1:]) / number
    position = number / 64
    highest = np.maximum.accumulate(surprise[1:])
    constant = np.ones(len(number))
    rows = (constant, position, position**2, mean, highest, surprise[1:], surprise[:-1])
    return np.stack(rows, axis=1)


def explained(
    x: DoubleArray, y: DoubleArray, is_first: npt.NDArray[np.bool_]
) -> tuple[DoubleArray, float]:
    """Return the predictions of each half by the other, and the share of variance explained."""
    predicted = np.zeros_like(y)
    for half in (is_first, ~is_first):
        own = x[~half]
        weights = np.linalg.solve(own.T @ own + RIDGE * np.eye(x.shape[1]), own.T @ y[~half])
        predicted[half] = x[half] @ weights
    return predicted, 1 - float(np.var(y - predicted) / np.var(y))


def written(sample: Trajectory) -> DoubleArray:
    """Return the log-probs of the tokens that the policy wrote."""
    return sample.behavior_logprobs[sample.loss_mask].astype(np.float64)


def measure(run_dir: Path) -> None:
    """Print the shares of one run."""
    with reading(run_dir) as store:
        groups = [each for each in rollouts(store, step=None, most=MOST_GROUPS) if each.step]
    samples = [(each.group.prompt_id, t) for each in groups for t in each.group.trajectories]
    parts = [features(written(t)) for _, t in samples]
    rewards = [
        np.full(len(part), t.score.reward) for (_, t), part in zip(samples, parts, strict=True)
    ]
    halves = [
        np.full(len(part), bool(zlib.crc32(prompt_id.encode()) % 2))
        for (prompt_id, _), part in zip(samples, parts, strict=True)
    ]
    quarters = [QUARTERS * np.arange(len(part)) // len(part) for part in parts]
    y, quarter = np.concatenate(rewards), np.concatenate(quarters)
    predicted, share = explained(np.concatenate(parts), y, np.concatenate(halves))
    steps = sorted({each.step for each in groups if each.step})
    rows = newest_rows(run_dir, steps[0])
    name = "value/explained_variance"
    own = [rows[step][name] for step in steps if name in rows.get(step, {})]
    title = f"{run_dir.name}, steps {steps[0]} to {steps[-1]}, {len(samples)} responses"
    if own:
        figure(f"{title}: the critic explains", statistics.mean(own), "of the variance")
    figure(f"{title}: position and surprise explain", share, "of the variance")
    for number in range(QUARTERS):
        of = quarter == number
        left = 1 - float(np.var(y[of] - predicted[of]) / np.var(y[of]))
        figure(f"{title}: quarter {number + 1}", left, "of the variance")


def main(words: Sequence[str] | None = None) -> None:
    """Measure each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    for run_dir in parser.parse_args(words).runs:
        measure(run_dir)


if __name__ == "__main__":
    main()
