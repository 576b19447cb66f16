"""A part of a learner batch, as flat tensors over response tokens.

Invariants
- The batch has B sequences on all ranks together, and each has one owner. A rank has the tokens of
  its own sequences, and of all others their heads: lengths, scores, prompts in common.
- R counts the response tokens of the rank's own sequences, in the order of the groups. Every
  per-token tensor of the learner has this order.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.edits import Edits
from async_rl.algorithms.parts import ALONE, Across, Parts
from async_rl.batching.calls import Calls, calls_of
from async_rl.batching.support import NO_GRAMMARS, Grammars, edits_of
from async_rl.core.frozen import frozen
from async_rl.core.heads import GroupHead, SampleHead, packed
from async_rl.core.types import Group, StepScore, Trajectory


@frozen
class BatchPart:
    """The heads of a whole batch, and the tokens of the sequences of one part.

    owners: the part of each of the B sequences; number: this one; trajectories: its own, in order.
    """

    heads: Sequence[GroupHead]
    owners: Sequence[int]
    number: int
    trajectories: Sequence[Trajectory]

    @property
    def own(self) -> list[int]:
        """The numbers of the part's sequences."""
        return [s for s, owner in enumerate(self.owners) if owner == self.number]


def whole(groups: Sequence[Group]) -> BatchPart:
    """Return the batch as its only part."""
    # A replay has all tokens on every rank and takes its part afterwards.
    trajectories = [t for group in groups for t in group.trajectories]
    return BatchPart(
        heads=[packed(group).head for group in groups],
        owners=[0] * len(trajectories),
        number=0,
        trajectories=trajectories,
    )


@frozen
class Sizes:
    """The sizes of the B sequences. They decide how sequences are divided among parts and passes.

    prompt_key: the group of each sequence; sequences of a group share the prompt in a packed row.
    """

    prompt_key: list[int]
    prompt_lengths: list[int]
    response_lengths: list[int]

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.prompt_key)


@frozen
class Batch(Sizes):
    """The sequences of one step, as one rank has them.

    On the host:
      owners            the part of each of the B sequences
      trajectories      by the number of an own sequence
      offsets           of each own sequence: its response is offsets[b] : offsets[b] + length of R
    On the device:
      group_index       int64 [B]
      rewards           float32 [B], before scaling
      is_truncated      bool [B]
      sequence_index    int64 [R]
      loss_mask         bool [R]
      behavior_logprobs float32 [R]
      versions          int64 [R]
    steps: the scored steps of all sequences, in order, each with the number of its sequence;
    baselines: the greedy answer of each group, which is not trained; none without.  across: sums
    over the ranks.  edits: the changes of the logits at the R tokens, None without any; is_outside:
    bool [R], tokens that their support excludes, which are not trained.
    """

    owners: Sequence[int]
    trajectories: dict[int, Trajectory]
    offsets: dict[int, int]
    num_groups: int
    group_index: Tensor
    rewards: Tensor
    is_truncated: Tensor
    sequence_index: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    versions: Tensor
    steps: Sequence[tuple[int, StepScore]]
    calls: Calls
    baselines: Sequence[SampleHead]
    across: Across
    edits: Edits | None
    is_outside: Tensor

    @property
    def num_tokens(self) -> int:
        """R."""
        return len(self.loss_mask)

    def sequences(self, mask: Tensor) -> Parts:
        """Return the sequences of the batch as parts of the own tokens. mask: bool [R]."""
        return Parts(
            index=self.sequence_index, count=self.num_sequences, mask=mask, across=self.across
        )

    def rows(self, flat: Tensor) -> Tensor:
        """Lay a per-token tensor out as right-padded rows: any dtype [R] -> the same dtype [N, L].

        A row has the tokens of one part of the calls of an own sequence (N: `Calls.rows`); L is the
        longest of them; padding is 0.
        """
        numbers, row, column = self.calls.rows()
        # Without any token both are 0.
        longest = int(column.max()) + 1 if len(column) else 0
        padded = flat.new_zeros(len(numbers), longest)
        padded[row, column] = flat
        return padded

    def flat(self, rows: Tensor) -> Tensor:
        """Invert `rows`: any dtype [N, L] -> the same dtype [R]."""
        return rows[self.calls.rows()[1:]]


def sizes_of(heads: Sequence[GroupHead]) -> Sizes:
    """Return the sizes of the sequences of these groups."""
    samples = [sample for group in heads for sample in group.samples]
    return Sizes(
        # By group: equal prompts of two groups would tie their minibatches together.
        prompt_key=[index for index, group in enumerate(heads) for _ in group.samples],
        prompt_lengths=[sample.prompt_length for sample in samples],
        response_lengths=[sample.response_length for sample in samples],
    )


def collate_part(
    part: BatchPart,
    *,
    device: torch.device,
    across: Across = ALONE,
    temperature: float = 1.0,
    grammars: Grammars = NO_GRAMMARS,
) -> Batch:
    """Flatten a rank's part of a batch on the device; dtypes and shapes as in `Batch`.

    temperature: of the samples. Raises ValueError for a sequence without a prompt.
    """
    samples = [sample for group in part.heads for sample in group.samples]
    # Checked here: packing would predict the token from the end of another sequence.
    if any(sample.prompt_length < 1 for sample in samples):
        raise ValueError(
            "a trajectory has no prompt token, so nothing predicts its first response token; give"
            " every prompt at least one token"
        )
    sizes = sizes_of(part.heads)
    own = part.own
    trajectories = part.trajectories

    def responses(values: Callable[[Trajectory], np.ndarray], dtype: torch.dtype) -> Tensor:
        # A rank may have no sequence of a small batch.
        mine = [values(t)[t.prompt_length :] for t in trajectories]
        flat = np.concatenate(mine) if mine else np.empty(0)
        return torch.from_numpy(flat).to(device=device, dtype=dtype)

    lengths = torch.tensor([t.response_length for t in trajectories], dtype=torch.int64)
    # On the host: packing reads them for each sequence.
    starts = [0, *lengths.cumsum(0).tolist()]
    edits, is_outside = edits_of(trajectories, grammars, temperature=temperature, device=device)
    return Batch(
        prompt_key=sizes.prompt_key,
        prompt_lengths=sizes.prompt_lengths,
        response_lengths=sizes.response_lengths,
        owners=part.owners,
        trajectories=dict(zip(own, trajectories, strict=True)),
        offsets=dict(zip(own, starts, strict=False)),
        num_groups=len(part.heads),
        # Of all sequences, so every rank computes the same statistics of groups.
        group_index=torch.tensor(sizes.prompt_key, device=device),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32, device=device),
        is_truncated=torch.tensor([sample.is_truncated for sample in samples], device=device),
        sequence_index=torch.tensor(own, dtype=torch.int64).repeat_interleave(lengths).to(device),
        loss_mask=responses(lambda t: t.loss_mask, torch.bool) & ~is_outside,
        behavior_logprobs=responses(lambda t: t.behavior_logprobs, torch.float32),
        versions=responses(lambda t: t.versions, torch.int64),
        steps=[(s, step) for s, sample in enumerate(samples) for step in sample.steps],
        calls=calls_of(part.heads, own=own, device=device),
        baselines=[group.baseline for group in part.heads if group.baseline is not None],
        across=across,
        edits=edits,
        is_outside=is_outside,
    )
