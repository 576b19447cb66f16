"""One learner batch as flat tensors over response tokens.

Invariants
- R counts the response tokens of all B sequences, in the order of the groups; every per-token
  tensor of the learner has this order.
- Every rank holds the whole batch; only forward passes are shared out.
Built by the learner from the groups of one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.core.types import Group, IntArray, Trajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Scored steps of all sequences, in order: last_token int64 [S], place in R of each step's last
    token; scores float32 [S]; is_first bool [S], the first of its sequence.
    """

    last_token: Tensor
    scores: Tensor
    is_first: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The untrained greedy answer of each group: rewards float32 [G], lengths int64 [G],
    is_truncated bool [G].
    """

    rewards: Tensor
    lengths: Tensor
    is_truncated: Tensor


_SHARED_TOKENS = 1024
"""Longest response whose prompt is shared: sharing needs a mask of its square, longer ones attend
faster, and in less memory, without.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one step.

    token_ids: int32 arrays, prompt and response of each sequence (B of them), kept on the host for
    packing.
    prompt_key: int [B], equal where two sequences of a group begin with the same prompt and stand
    in one row with it.
    prompt_lengths, response_lengths, offsets: int64 [B], on the host; response b is offsets[b] :
    offsets[b] + response_lengths[b] of R.
    group_index, sequence_index: int64 [B], [R].  rewards: float32 [B], the task's own scale.
    is_truncated: bool [B]. loss_mask bool [R], behavior_logprobs float32 [R], versions int64 [R].
    baselines: None unless every group has one.
    """

    token_ids: list[IntArray]
    prompt_key: list[int]
    prompt_lengths: list[int]
    response_lengths: list[int]
    offsets: list[int]
    num_groups: int
    group_index: Tensor
    sequence_index: Tensor
    rewards: Tensor
    is_truncated: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    versions: Tensor
    steps: Steps
    baselines: Baselines | None

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """R."""
        return int(self.loss_mask.numel())

    def rows(self, flat: Tensor) -> Tensor:
        """Lay a per-token tensor [R] out as right-padded rows [B, L], padded with zeros."""
        padded = flat.new_zeros(self.num_sequences, max(self.response_lengths, default=0))
        padded[self._cells] = flat
        return padded

    def flat(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`: [B, L] -> [R]."""
        return rows[self._cells]

    @property
    def _cells(self) -> tuple[Tensor, Tensor]:
        offsets = torch.tensor(self.offsets, device=self.sequence_index.device)
        return (
            self.sequence_index,
            torch.arange(self.num_tokens, device=offsets.device) - offsets[self.sequence_index],
        )


def collate(groups: Sequence[Group], *, device: torch.device) -> Batch:
    """Flatten groups. Raises ValueError on an empty batch or a sequence without a prompt."""
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        raise ValueError("the batch has no sequence; the buffer must hand out complete groups")
    if any(t.prompt_length < 1 for t in trajectories):
        raise ValueError(
            "a trajectory has no prompt token, so nothing predicts its first response token"
        )
    group_index = [i for i, group in enumerate(groups) for _ in group.trajectories]
    lengths = [t.response_length for t in trajectories]
    keys: dict[tuple[int, bytes], int] = {}
    prompt_key = [
        keys.setdefault(
            (
                (g, t.token_ids[: t.prompt_length].tobytes())
                if t.response_length <= _SHARED_TOKENS
                else (i, b"")
            ),
            len(keys),
        )
        for i, (g, t) in enumerate(zip(group_index, trajectories, strict=True))
    ]

    def responses(arrays: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        flat = np.concatenate(
            [a[t.prompt_length :] for a, t in zip(arrays, trajectories, strict=True)]
        )
        return torch.from_numpy(flat).to(device=device, dtype=dtype)

    offsets: list[int] = [0, *np.cumsum(lengths).tolist()[:-1]]
    return Batch(
        token_ids=[t.token_ids for t in trajectories],
        prompt_key=prompt_key,
        prompt_lengths=[t.prompt_length for t in trajectories],
        response_lengths=lengths,
        offsets=offsets,
        num_groups=len(groups),
        group_index=torch.tensor(group_index, device=device),
        sequence_index=torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(device),
        rewards=torch.tensor(
            [t.score.reward for t in trajectories], dtype=torch.float32, device=device
        ),
        is_truncated=torch.tensor(
            [t.is_truncated for t in trajectories], dtype=torch.bool, device=device
        ),
        loss_mask=responses([t.loss_mask for t in trajectories], torch.bool),
        behavior_logprobs=responses([t.behavior_logprobs for t in trajectories], torch.float32),
        versions=responses([t.versions for t in trajectories], torch.int64),
        steps=_steps(trajectories, offsets, device),
        baselines=_baselines(groups, device),
    )


def _steps(
    trajectories: Sequence[Trajectory], offsets: Sequence[int], device: torch.device
) -> Steps:
    steps = [
        (offset + s.end_tokens - 1, s.reward, s is t.score.steps[0])
        for t, offset in zip(trajectories, offsets, strict=True)
        for s in t.score.steps
    ]
    return Steps(
        last_token=torch.tensor([place for place, _, _ in steps], dtype=torch.int64, device=device),
        scores=torch.tensor([score for _, score, _ in steps], dtype=torch.float32, device=device),
        is_first=torch.tensor([first for _, _, first in steps], dtype=torch.bool, device=device),
    )


def _baselines(groups: Sequence[Group], device: torch.device) -> Baselines | None:
    found = [group.baseline for group in groups if group.baseline is not None]
    if len(found) < len(groups):
        return None
    return Baselines(
        rewards=torch.tensor([t.score.reward for t in found], dtype=torch.float32, device=device),
        lengths=torch.tensor([t.response_length for t in found], device=device),
        is_truncated=torch.tensor([t.is_truncated for t in found], dtype=torch.bool, device=device),
    )
