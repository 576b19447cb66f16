"""A finished group in its other forms: packed, as it crosses sockets and is stored; its head for
the ranks of the learner.

A batch of 64 groups of 16 x 32k tokens is 270 MB; its heads are 0.2 MB. Pure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from async_rl.core.calls import AgentCall
from async_rl.core.codec import compressed, decode, decompressed, encode
from async_rl.core.frozen import Value
from async_rl.core.types import (
    NO_VERSION,
    Group,
    GroupFields,
    SampleFields,
    StepScore,
    Trajectory,
)

SampleId = tuple[int, int]
"""The id of a group and the number of one of its samples."""
_INT = np.dtype("<i4")
_FLOAT = np.dtype("<f4")


class SampleHead(Value):
    """The lengths and the score of one sequence."""

    prompt_length: int
    response_length: int
    is_truncated: bool
    reward: float
    parts: dict[str, float]
    steps: tuple[StepScore, ...]
    calls: tuple[AgentCall, ...]

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
        """Return whether all samples have the same reward and no call has one, so that most
        estimators of advantages give them none.
        """
        has_rewards = any(call.reward for sample in self.samples for call in sample.calls)
        return not has_rewards and len({sample.reward for sample in self.samples}) == 1


def sample_ids(heads: Sequence[GroupHead]) -> list[SampleId]:
    """Return the ids of all samples, in order."""
    return [(group.group_id, n) for group in heads for n in range(len(group.samples))]


class PackedSample(SampleFields, kw_only=True):
    """A sample of a packed group. runs: (number of tokens, version, is trained) along its response;
    response_length: tokens.
    """

    response_length: int
    runs: list[tuple[int, int, bool]]

    @property
    def num_written(self) -> int:
        """The tokens that the policy wrote."""
        return sum([length for length, version, _ in self.runs if version != NO_VERSION])


class PackedTrajectory(Value):
    """A sample of a packed group with its prompt, as a rank of the learner reads it. The bytes are
    as in PackedGroup.
    """

    prompt: bytes
    sample: PackedSample
    token_ids: memoryview
    behavior_logprobs: memoryview

    def as_of(self, version: int) -> PackedTrajectory:
        """Return it with this version in place of every later one."""
        runs = [(length, min(of, version), trained) for length, of, trained in self.sample.runs]
        return replace(self, sample=replace(self.sample, runs=runs))

    def unpacked(self) -> Trajectory:
        """Return the sample with an array per fact about its tokens."""
        prompt = np.frombuffer(self.prompt, _INT)
        tokens = np.frombuffer(self.token_ids, _INT)
        runs = [(len(prompt), NO_VERSION, False), *self.sample.runs]
        lengths, version_of, is_trained = zip(*runs, strict=True)
        versions = np.repeat(np.array(version_of, np.int32), lengths)
        logprobs = np.zeros(len(versions), np.float32)
        logprobs[versions != NO_VERSION] = np.frombuffer(self.behavior_logprobs, _FLOAT)
        return Trajectory(
            **_facts(self.sample, SampleFields),
            token_ids=np.concatenate([prompt, tokens]),
            prompt_length=len(prompt),
            loss_mask=np.repeat(np.array(is_trained), lengths),
            behavior_logprobs=logprobs,
            versions=versions,
        )


class PackedGroup(GroupFields, kw_only=True):
    """A group whose samples have one prompt, as few objects: the buffer checks and stores thousands
    per second without a Python object per sequence of tokens.

    prompt: its tokens, int32 [P]; token_ids int32 [R] and behavior_logprobs float32 [W]: the
    responses of all samples, then of the baseline, as little-endian bytes. W counts the tokens that
    the policy wrote; an agent reads many times as many.
    """

    prompt: bytes
    samples: list[PackedSample]
    # Views of the message: a copy takes longer than the checks of its values.
    token_ids: memoryview
    behavior_logprobs: memoryview
    baseline: PackedSample | None = None

    @property
    def members(self) -> list[PackedSample]:
        """The samples and the baseline."""
        return self.samples if self.baseline is None else [*self.samples, self.baseline]

    @property
    def prompt_length(self) -> int:
        """P."""
        return len(self.prompt) // _INT.itemsize

    @property
    def head(self) -> GroupHead:
        """The heads of its members, without their tokens."""
        heads = [
            SampleHead(
                prompt_length=self.prompt_length,
                response_length=sample.response_length,
                is_truncated=sample.is_truncated,
                reward=sample.score.reward,
                parts=sample.score.parts,
                steps=sample.score.steps,
                calls=sample.calls,
            )
            for sample in self.members
        ]
        return GroupHead(
            group_id=self.group_id,
            samples=heads[: len(self.samples)],
            baseline=None if self.baseline is None else heads[-1],
        )

    def member(self, number: int) -> PackedTrajectory:
        """Return a member of the group with its own tokens."""
        sample = self.members[number]
        # Token ids and log-probs have 4 bytes each.
        first = 4 * sum(other.response_length for other in self.members[:number])
        written = 4 * sum(other.num_written for other in self.members[:number])
        return PackedTrajectory(
            prompt=self.prompt,
            sample=sample,
            token_ids=self.token_ids[first:][: 4 * sample.response_length],
            behavior_logprobs=self.behavior_logprobs[written:][: 4 * sample.num_written],
        )

    def unpacked(self) -> Group:
        """Return the group with its trajectories."""
        members = [self.member(number).unpacked() for number in range(len(self.members))]
        return Group(
            **_facts(self, GroupFields),
            trajectories=members[: len(self.samples)],
            baseline=None if self.baseline is None else members[-1],
        )


def packed(group: Group) -> PackedGroup:
    """Return the group packed. Raises ValueError unless it has one prompt."""
    baseline = [] if group.baseline is None else [group.baseline]
    members = [*group.trajectories, *baseline]
    prompts = {member.token_ids[: member.prompt_length].tobytes() for member in members}
    if len(prompts) != 1:
        raise ValueError(f"group {group.group_id} has {len(prompts)} prompts instead of one")
    samples = [_packed(member) for member in members]
    return PackedGroup(
        **_facts(group, GroupFields),
        prompt=prompts.pop(),
        samples=samples[: len(group.trajectories)],
        token_ids=_bytes([m.token_ids[m.prompt_length :] for m in members], _INT),
        behavior_logprobs=_bytes(
            [m.behavior_logprobs[m.versions != NO_VERSION] for m in members], _FLOAT
        ),
        baseline=samples[-1] if baseline else None,
    )


def pack_group(group: Group) -> bytes:
    """Return the group packed and compressed. Raises as `packed`."""
    return compressed(encode(packed(group)))


def read_group(data: bytes | memoryview) -> PackedGroup:
    """Return the group of `pack_group`. Raises ProtocolError."""
    return decode(decompressed(data), PackedGroup)


def _bytes(parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> memoryview:
    return memoryview(np.concatenate(parts).astype(dtype).view(np.uint8))


def _facts(value: Value, of: type[Value]) -> dict[str, Any]:
    """The fields that a value shares with another form of it."""
    return {name: getattr(value, name) for name in of.__struct_fields__}


def _packed(sample: Trajectory) -> PackedSample:
    start = sample.prompt_length
    tokens = zip(sample.versions[start:].tolist(), sample.loss_mask[start:].tolist(), strict=True)
    return PackedSample(
        **_facts(sample, SampleFields),
        response_length=sample.response_length,
        runs=[(len(list(run)), *kind) for kind, run in itertools.groupby(tokens)],
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
