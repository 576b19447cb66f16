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

from async_rl.buffer.policies import CANDIDATES, EXPONENT, WINDOW, Result, expected_spreads
from async_rl.buffer.store.ledger import reading
from async_rl.config.run import RunConfig
from async_rl.runs.samples import issued_prompts

_RESULTS = (
    "SELECT position, rewards AS \"rewards [stored_json]\" FROM groups WHERE purpose='train' AND"
    " rewards IS NOT NULL ORDER BY position DESC LIMIT 1024"
)
_LEAST = 1.1  # times the recorded spread, of a gain that is told


def selection_gain(run_dir: Path, config: RunConfig) -> Iterator[str]:
    """Yield a sentence about the spread of rewards that data.order=priority would have brought."""
    count = config.buffer.groups_per_step
    with reading(run_dir) as store:
        prompts = issued_prompts(run_dir, config, store)
        recorded = store.execute(_RESULTS).fetchall()[::-1]
    if prompts is None or config.data.order != "shuffled":
        return
    row_of = prompts.order.index
    results = [
        Result(row=row_of(position), position=position, rewards=rewards)
        for position, rewards in recorded
    ]
    spreads = np.array([np.std(result.rewards) for result in results])
    weights = np.ones(len(results))
    # At its start, a batch knows no result of the groups that are still active.
    active = (config.buffer.max_staleness_versions + 1) * count
    for start in range(active, len(results), count):
        batch = slice(start, start + count)
        weights[batch] = expected_spreads(
            [prompts.train(result.row) for result in results[batch]],
            count=count,
            results=results[max(start - active - WINDOW, 0) : start - active],
            prompt=prompts.train,
        )
    means: list[tuple[float, float]] = []
    # As many prompts as a policy has for a batch, of about the same time: what changes during a run
    # is no choice of prompts.
    number = CANDIDATES * count
    for start in range(active, len(results) - number + 1, number):
        near = slice(start, start + number)
        drawn = np.average(spreads[near], weights=weights[near] ** EXPONENT)
        means.append((float(spreads[near].mean()), float(drawn)))
    spread, expected = np.mean(means or [(0.0, 0.0)], axis=0)
    if expected > _LEAST * spread:
        yield (
            f"the rewards of a group have a standard deviation of {spread:.2g}, without which"
            f" nothing is learned, over {len(means) * number} groups; with data.order=priority it"
            f" would be {expected:.2g}"
        )
