"""A finished group without its tokens: its head for the ranks of the learner, its summary for the
buffer and the store.

A batch of 64 groups of 16 x 32k tokens is 270 MB; its heads are 0.2 MB. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from async_rl.core.frozen import Value, frozen
from async_rl.core.types import NO_VERSION, Group, StepScore, Trajectory

SampleId = tuple[int, int]
"""The id of a group and the number of one of its samples."""


class SampleHead(Value):
    """The lengths and the score of one sequence. prompt: the number of the first sample of its
    group that has the same prompt tokens.
    """

    prompt: int
    prompt_length: int
    response_length: int
    is_truncated: bool
    reward: float
    parts: dict[str, float]
    steps: tuple[StepScore, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return self.prompt_length + self.response_length


class GroupHead(Value):
    """The heads of a group's samples, in their order, and of its greedy answer."""

    group_id: int
    samples: list[SampleHead]
    baseline: SampleHead | None = None

    @property
    def is_uniform(self) -> bool:
        """Return whether all samples have the same reward, so that most estimators of advantages
        give them none.
        """
        return len({sample.reward for sample in self.samples}) == 1


def sample_ids(heads: Sequence[GroupHead]) -> list[SampleId]:
    """Return the ids of all samples, in order."""
    return [(group.group_id, n) for group in heads for n in range(len(group.samples))]


def head_of(group: Group) -> GroupHead:
    """Return the head of a group."""
    prompts: dict[bytes, int] = {}
    samples = []
    for number, sample in enumerate(group.trajectories):
        prompt = sample.token_ids[: sample.prompt_length].tobytes()
        # Equal prompts are found by content, so that the learner computes each one once.
        samples.append(_sample_head(sample, prompts.setdefault(prompt, number)))
    baseline = group.baseline
    return GroupHead(
        group_id=group.group_id,
        samples=samples,
        baseline=None if baseline is None else _sample_head(baseline, 0),
    )


def _sample_head(sample: Trajectory, prompt: int) -> SampleHead:
    score = sample.score
    return SampleHead(
        prompt=prompt,
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        is_truncated=sample.is_truncated,
        reward=score.reward,
        parts=score.parts,
        steps=score.steps,
    )


@frozen
class Summary:
    """A group in numbers. Versions are of the trained tokens, NO_VERSION without any. pass_rate:
    share of samples that passed every test.
    """

    oldest_version: int
    newest_version: int
    num_tokens: int
    num_trained_tokens: int
    reward_mean: float
    pass_rate: float
    response_length_mean: float
    truncated_share: float


def summarize(group: Group) -> Summary:
    """Return the summary of a complete group, whose samples passed `checks.check_trajectory`."""
    samples = group.trajectories
    is_trained = np.concatenate([s.loss_mask for s in samples])
    # Masked tokens, such as replies of tools, do not age a group: they have no gradient.
    versions = np.concatenate([s.versions for s in samples])[is_trained]
    return Summary(
        oldest_version=int(versions.min()) if versions.size else NO_VERSION,
        newest_version=int(versions.max()) if versions.size else NO_VERSION,
        num_tokens=group.num_tokens,
        num_trained_tokens=versions.size,
        reward_mean=statistics.fmean(s.score.reward for s in samples),
        pass_rate=statistics.fmean(s.score.is_passed for s in samples),
        response_length_mean=statistics.fmean(s.response_length for s in samples),
        truncated_share=statistics.fmean(s.is_truncated for s in samples),
    )


def means_by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each named number over the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            # A row without the name does not count as 0: a sample of another data source has other
            # parts of the reward.
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def failed_share(rewards: Iterable[float], fail_reward: float) -> float:
    """Return the share of rewards that are at most the reward of a failure; 0 without rewards."""
    # At most and not equal: penalties of a plug-in may go below the reward of a failure.
    has_failed = [reward <= fail_reward for reward in rewards]
    return statistics.fmean(has_failed) if has_failed else 0.0
