"""One finished group in numbers, for admission, the store and evaluation.

Pure; the buffer computes it once per put.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION, Group


@frozen
class Summary:
    """Versions are of the trained tokens, NO_VERSION without any. pass_rate: share of samples
    that passed every test.
    """

    oldest_version: int
    newest_version: int
    num_tokens: int
    num_trained_tokens: int
    reward_mean: float
    pass_rate: float
    response_length_mean: float
    truncated_share: float

    @property
    def row(self) -> tuple[Any, ...]:
        """The values in the order of the fields."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def part_means(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each named part of the reward over the samples that have it. samples: the parts
    of each.
    """
    values: dict[str, list[float]] = {}
    for parts in samples:
        for name, value in parts.items():
            # A sample without the part does not count as 0: another data source has other parts.
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def failed_share(rewards: Iterable[float], fail_reward: float) -> float:
    """The share of rewards that are at most the reward of a failure; 0 without any."""
    # At most and not equal: penalties of a plug-in may go below the reward of a failure.
    has_failed = [reward <= fail_reward for reward in rewards]
    return statistics.fmean(has_failed) if has_failed else 0.0


def summarize(group: Group) -> Summary:
    """The numbers of a complete group, whose samples passed `checks.check_trajectory`."""
    samples = group.trajectories
    is_trained = np.concatenate([s.loss_mask for s in samples])
    # Masked tokens, such as replies of tools, do not age a group: they have no gradient.
    versions = np.concatenate([s.versions for s in samples])[is_trained]
    oldest = newest = NO_VERSION
    if versions.size:
        oldest = int(versions.min())
        newest = int(versions.max())
    return Summary(
        oldest_version=oldest,
        newest_version=newest,
        num_tokens=group.num_tokens,
        num_trained_tokens=versions.size,
        reward_mean=statistics.fmean(s.score.reward for s in samples),
        pass_rate=statistics.fmean(s.score.is_passed for s in samples),
        response_length_mean=statistics.fmean(s.response_length for s in samples),
        truncated_share=statistics.fmean(s.is_truncated for s in samples),
    )
