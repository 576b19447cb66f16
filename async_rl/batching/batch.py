"""A part of a learner batch, as flat tensors over response tokens, and the calls of agents in it.

Invariants
- The batch has B sequences on all ranks together, and each has one owner. A rank has the tokens of
  its own sequences, and of all others their heads: lengths, scores, prompts in common.
- R counts the response tokens of the rank's own sequences, in the order of the groups. Every
  per-token tensor of the learner has this order.
- A sequence without an agent has one call, which is all of it. The calls of one sequence with one
  role are a part, which has advantages of its own. Every rank has the calls of all sequences.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.logits import Edits
from async_rl.algorithms.parts import ALONE, Across, Parts
from async_rl.batching.support import NO_GRAMMARS, Grammars, edits_of
from async_rl.core.calls import AgentCall
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
class Calls:
    """The U trained calls of B sequences, sequence after sequence, in the order of their requests,
    and their P parts.

    sequence: int64 [U]; part: int64 [U]; rewards: float32 [U], of the call alone.
    part_sequence: int64 [P]; part_group: int64 [P], equal for parts that are compared: of one group
    and one role; num_groups: of these.
    of_tokens: int64 [R], the call of each token of the own sequences.
    """

    sequence: Tensor
    part: Tensor
    rewards: Tensor
    part_sequence: Tensor
    part_group: Tensor
    num_groups: int
    of_tokens: Tensor

    @property
    def turn(self) -> Tensor:
        """The place of each call in its part: int64 [U]."""
        return _places(self.part)

    @property
    def is_last(self) -> Tensor:
        """True for the last call of each part: bool [U]."""
        return self.turn + 1 == self.part.bincount()[self.part]

    def sums(self, of_calls: Tensor) -> Tensor:
        """Add up the calls of each part: float32 [U] -> float32 [P]."""
        return of_calls.new_zeros(len(self.part_sequence)).index_add_(0, self.part, of_calls)

    @property
    def part_of_tokens(self) -> Tensor:
        """The part of each token of the own sequences: int64 [R]."""
        return self.part[self.of_tokens]

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts with own tokens, ascending: int64 [N], and of each token its row among
        these parts and its place in the row: int64 [R], int64 [R].
        """
        numbers: Tensor
        row: Tensor
        numbers, row = torch.unique(self.part_of_tokens, return_inverse=True)
        return numbers, row, _places(row)

    def by_turn(self, of_calls: Tensor) -> Tensor:
        """Lay calls out as right-padded rows: any dtype [U] -> the same dtype [P, K]. K: the most
        calls of a part; padding is 0.
        """
        turn = self.turn
        rows = of_calls.new_zeros(len(self.part_sequence), int(turn.max()) + 1)
        rows[self.part, turn] = of_calls
        return rows


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
        calls=_calls_of(part.heads, own=own, device=device),
        baselines=[group.baseline for group in part.heads if group.baseline is not None],
        across=across,
        edits=edits,
        is_outside=is_outside,
    )


def _places(of: Tensor) -> Tensor:
    """Return the place of each element among those that equal it: int64 [N] -> int64 [N]."""
    sizes = of.bincount()
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places = torch.empty_like(of)
    # A stable sort keeps the order of equal elements.
    places[of.argsort(stable=True)] = torch.arange(len(of), device=of.device) - starts
    return places


def _calls_of(heads: Sequence[GroupHead], *, own: Sequence[int], device: torch.device) -> Calls:
    """Return the calls of a batch. own: the numbers of the rank's sequences."""
    samples = [sample for head in heads for sample in head.samples]
    group = torch.tensor([index for index, head in enumerate(heads) for _ in head.samples])
    trained = [_trained(sample) for sample in samples]
    roles: dict[str, int] = {}
    calls = [
        (number, roles.setdefault(call.role, len(roles)), call.reward)
        for number, of_sample in enumerate(trained)
        for call in of_sample
    ]
    sequence, role, rewards = map(torch.tensor, zip(*calls, strict=True))
    num_roles = len(roles)
    keys, part = torch.unique(sequence * num_roles + role, return_inverse=True)
    part_sequence = keys // num_roles
    starts = [0, *itertools.accumulate(map(len, trained))]
    # A rank may have no sequence of a small batch.
    of_tokens = [torch.empty(0, dtype=torch.int64)]
    of_tokens += [starts[s] + _call_of_tokens(trained[s], samples[s].response_length) for s in own]
    return Calls(
        sequence=sequence.to(device),
        part=part.to(device),
        rewards=rewards.to(device),
        part_sequence=part_sequence.to(device),
        part_group=(group[part_sequence] * num_roles + keys % num_roles).to(device),
        num_groups=len(heads) * num_roles,
        of_tokens=torch.cat(of_tokens).to(device),
    )


def _trained(sample: SampleHead) -> Sequence[AgentCall]:
    """The trained calls of a sequence; one that is all of it if it has none."""
    whole = AgentCall(end_tokens=sample.response_length, num_tokens=sample.response_length)
    return [call for call in sample.calls if call.end_tokens] or [whole]


def _call_of_tokens(calls: Sequence[AgentCall], num_tokens: int) -> Tensor:
    """The number of the call that each token of a sequence belongs to: int64 [num_tokens]."""
    # The row may have the calls in another order than that of their requests.
    ends, order = torch.tensor([call.end_tokens for call in calls]).sort()
    # Without the last end: tokens after it are not trained, and count as its own.
    return order[torch.searchsorted(ends[:-1], torch.arange(num_tokens), right=True)]
