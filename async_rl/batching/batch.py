"""One learner batch as flat tensors over response tokens.

Invariants
- R counts the response tokens of all B sequences, in the order of the groups. Every per-token
  tensor of the learner has this order.
- Every rank holds the whole batch; only forward passes are divided among ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.core.types import Group, IntArray, Trajectory

# The longest response that shares its prompt with others. Sharing needs an attention mask of
# response x (prompt + response); longer responses are faster and smaller without it.
_SHARED_TOKENS = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The S scored steps of all sequences, in order.

    last_token: int64 [S], index in R of each step's last token; scores: float32 [S]; is_first: bool
    [S], the first step of its sequence.
    """

    last_token: Tensor
    scores: Tensor
    is_first: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """The greedy answer of each group, which is not trained.

    rewards: float32 [num_groups]; lengths: int64 [num_groups]; is_truncated: bool [num_groups].
    """

    rewards: Tensor
    lengths: Tensor
    is_truncated: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of one step.

    On the host, one entry per sequence (B):
      token_ids         int32 arrays, prompt and response
      prompt_key        equal for sequences of a group that share the prompt in a packed row
      prompt_lengths, response_lengths
      offsets           response b is offsets[b] : offsets[b] + response_lengths[b] of R
    On the device:
      group_index       int64 [B]
      sequence_index    int64 [R]
      rewards           float32 [B], before scaling
      is_truncated      bool [B]
      loss_mask         bool [R]
      behavior_logprobs float32 [R]
      versions          int64 [R]
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
        return len(self.loss_mask)

    def rows(self, flat: Tensor) -> Tensor:
        """Lay a per-token tensor out as right-padded rows: any dtype [R] -> the same dtype [B, L].

        L is the longest response; padding is 0.
        """
        padded = flat.new_zeros(self.num_sequences, max(self.response_lengths, default=0))
        padded[self._cells] = flat
        return padded

    def flat(self, rows: Tensor) -> Tensor:
        """Invert `rows`: any dtype [B, L] -> the same dtype [R]."""
        return rows[self._cells]

    @property
    def _cells(self) -> tuple[Tensor, Tensor]:
        """Row and column of each token."""
        offsets = torch.tensor(self.offsets, device=self.sequence_index.device)
        tokens = torch.arange(self.num_tokens, device=offsets.device)
        return self.sequence_index, tokens - offsets[self.sequence_index]


def collate(groups: Sequence[Group], *, device: torch.device) -> Batch:
    """Flatten groups into a batch on the device; dtypes and shapes are those of `Batch`.

    Raises ValueError for a batch without sequences, and for a sequence without a prompt.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        raise ValueError("the batch has no sequence; the buffer must return complete groups")
    if any(t.prompt_length < 1 for t in trajectories):
        raise ValueError(
            "a trajectory has no prompt token, so nothing predicts its first response token; give"
            " every prompt at least one token"
        )

    def tensor(values: Iterable[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    def responses(arrays: Iterable[np.ndarray], dtype: torch.dtype) -> Tensor:
        pairs = zip(arrays, trajectories, strict=True)
        flat = np.concatenate([array[t.prompt_length :] for array, t in pairs])
        return torch.from_numpy(flat).to(device=device, dtype=dtype)

    group_index = [i for i, group in enumerate(groups) for _ in group.trajectories]
    lengths = [t.response_length for t in trajectories]
    offsets: list[int] = [0, *np.cumsum(lengths).tolist()[:-1]]
    return Batch(
        token_ids=[t.token_ids for t in trajectories],
        prompt_key=_prompt_keys(trajectories, group_index),
        prompt_lengths=[t.prompt_length for t in trajectories],
        response_lengths=lengths,
        offsets=offsets,
        num_groups=len(groups),
        group_index=tensor(group_index, torch.int64),
        sequence_index=torch.repeat_interleave(torch.tensor(lengths)).to(device),
        rewards=tensor((t.score.reward for t in trajectories), torch.float32),
        is_truncated=tensor((t.is_truncated for t in trajectories), torch.bool),
        loss_mask=responses((t.loss_mask for t in trajectories), torch.bool),
        behavior_logprobs=responses((t.behavior_logprobs for t in trajectories), torch.float32),
        versions=responses((t.versions for t in trajectories), torch.int64),
        steps=_steps(trajectories, offsets, device),
        baselines=_baselines(groups, device),
    )


def _prompt_keys(trajectories: Sequence[Trajectory], group_index: Sequence[int]) -> list[int]:
    """A number for each sequence, equal where sequences share their prompt."""
    numbers: dict[tuple[int, bytes], int] = {}
    keys = []
    for index, (group, t) in enumerate(zip(group_index, trajectories, strict=True)):
        if t.response_length <= _SHARED_TOKENS:
            prompt = (group, t.token_ids[: t.prompt_length].tobytes())
        else:
            # A prompt has at least one token, so empty bytes collide with no other key.
            prompt = (index, b"")
        keys.append(numbers.setdefault(prompt, len(numbers)))
    return keys


def _steps(
    trajectories: Sequence[Trajectory], offsets: Sequence[int], device: torch.device
) -> Steps:
    last_token, scores, is_first = [], [], []
    for t, offset in zip(trajectories, offsets, strict=True):
        for index, step in enumerate(t.score.steps):
            last_token.append(offset + step.end_tokens - 1)
            scores.append(step.reward)
            is_first.append(index == 0)
    return Steps(
        last_token=torch.tensor(last_token, dtype=torch.int64, device=device),
        scores=torch.tensor(scores, dtype=torch.float32, device=device),
        is_first=torch.tensor(is_first, dtype=torch.bool, device=device),
    )


def _baselines(groups: Sequence[Group], device: torch.device) -> Baselines | None:
    greedy = [group.baseline for group in groups if group.baseline is not None]
    if len(greedy) < len(groups):
        return None
    return Baselines(
        rewards=torch.tensor([t.score.reward for t in greedy], dtype=torch.float32, device=device),
        lengths=torch.tensor([t.response_length for t in greedy], device=device),
        is_truncated=torch.tensor([t.is_truncated for t in greedy], device=device),
    )
