"""The gain that a selection of prompts would have brought to a recorded run.

The prompts of a run in the shuffled order are a sample of those that a policy chooses from. So the
policy's groups are forecast by the recorded groups, each weighted by the probability with which the
policy would have drawn it from what was known then (importance sampling). The forecast is low: the
policy would have known more about the prompts that it prefers. What the run would have learned from
its choices is left out.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from async_rl.buffer.policies import CANDIDATES, EXPONENT, WINDOW, Result, expected_gradients
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.buffer.store.ledger import reading
from async_rl.config.run import RunConfig
from async_rl.runs.order import issued_prompts

_RESULTS = (
    "SELECT position, rewards AS \"rewards [stored_json]\" FROM groups WHERE purpose='train' AND"
    " rewards IS NOT NULL ORDER BY position DESC LIMIT 1024"
)
_LEAST = 0.05  # of the share of groups with a gradient, of a gain that is told


def selection_gain(run_dir: Path, config: RunConfig) -> Iterator[str]:
    """Yield a sentence about the groups with a gradient that data.order=priority would have had."""
    count = config.buffer.groups_per_step
    with reading(run_dir / STORE_FILE) as store:
        prompts = issued_prompts(run_dir, config, store)
        recorded = store.execute(_RESULTS).fetchall()[::-1]
    if prompts is None or config.data.order != "shuffled":
        return
    row_of = prompts.order.index
    results = [
        Result(row=row_of(position), position=position, rewards=rewards)
        for position, rewards in recorded
    ]
    has_gradient = np.array([len(set(result.rewards)) > 1 for result in results], np.float64)
    weights = np.ones(len(results))
    # At its start, a batch knows no result of the groups that are still active.
    active = (config.buffer.max_staleness_versions + 1) * count
    for start in range(active, len(results), count):
        batch = slice(start, start + count)
        weights[batch] = expected_gradients(
            [prompts.train(result.row) for result in results[batch]],
            count=count,
            results=results[max(start - active - WINDOW, 0) : start - active],
            prompt=prompts.train,
        )
    shares: list[tuple[float, float]] = []
    # As many prompts as a policy has for a batch, of about the same time: what changes during a run
    # is no choice of prompts.
    number = CANDIDATES * count
    for start in range(active, len(results) - number + 1, number):
        near = slice(start, start + number)
        drawn = np.average(has_gradient[near], weights=weights[near] ** EXPONENT)
        recorded_share = has_gradient[near].mean()
        shares.append((float(recorded_share), float(drawn)))
    share, expected = np.mean(shares or [(0.0, 0.0)], axis=0)
    if expected - share >= _LEAST:
        yield (
            f"the rewards differ in {share:.0%} of {len(shares) * number} groups, in the others"
            f" nothing is learned; with data.order=priority they would in {expected:.0%} of as many"
        )
