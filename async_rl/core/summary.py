"""One finished group in numbers: what admission, the store and evaluation need to know without its
trajectories.

Pure; the buffer computes it once per put.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.core.errors import ProtocolError
from async_rl.core.types import NO_VERSION, Group, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Versions are those of the trained tokens, NO_VERSION if none is trained; pass_rate: share of
    samples of which every test passed.
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
        return tuple(getattr(self, name) for name in self.__slots__)


def part_means(samples: Iterable[Trajectory]) -> dict[str, float]:
    """The mean of each named part of the reward over the samples that have it."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.score.parts.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def failed_share(groups: Iterable[Group], fail_reward: float) -> float:
    """The share of samples with no more than the reward of a failure."""
    has_failed = [
        sample.score.reward <= fail_reward for group in groups for sample in group.trajectories
    ]
    return sum(has_failed) / max(len(has_failed), 1)


def summarize(group: Group) -> Summary:
    """The numbers of a complete group. Raises ProtocolError if its arrays do not fit together or
    hold values that cannot be.
    """
    if not group.trajectories:
        raise ProtocolError(f"group {group.group_id} has no trajectories")
    for i, sample in enumerate(group.trajectories):
        length = len(sample.token_ids)
        if (
            not len(sample.loss_mask)
            == len(sample.behavior_logprobs)
            == len(sample.versions)
            == length
            or not 0 < sample.prompt_length <= length
        ):
            raise ProtocolError(
                f"group {group.group_id}, sample {i}: arrays of different lengths, or no prompt"
            )
    # All samples at once: a pass per sample costs as much as storing it.
    versions = np.concatenate([s.versions for s in group.trajectories])[
        np.concatenate([s.loss_mask for s in group.trajectories])
    ]
    if versions.size and (
        versions.min() < 0
        or not np.isfinite(np.concatenate([s.behavior_logprobs for s in group.trajectories])).all()
    ):
        raise ProtocolError(
            f"group {group.group_id}: a trained token has no version, or a log-prob is not finite"
        )
    samples = group.trajectories
    return Summary(
        oldest_version=int(versions.min()) if versions.size else NO_VERSION,
        newest_version=int(versions.max()) if versions.size else NO_VERSION,
        num_tokens=group.num_tokens,
        num_trained_tokens=versions.size,
        reward_mean=sum(s.score.reward for s in samples) / len(samples),
        pass_rate=sum(s.score.is_passed for s in samples) / len(samples),
        response_length_mean=sum(s.response_length for s in samples) / len(samples),
        truncated_share=sum(s.is_truncated for s in samples) / len(samples),
    )
