"""The answers of agents in a batch: which tokens, rewards and roles they have.

A sequence without an agent has one call, which is all of it. The calls of one sequence with one
role are a part; each part has advantages of its own. Every rank has the calls of all sequences.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.core.calls import AgentCall
from async_rl.core.frozen import frozen
from async_rl.core.heads import GroupHead, SampleHead


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


def _places(of: Tensor) -> Tensor:
    """Return the place of each element among those that equal it: int64 [N] -> int64 [N]."""
    sizes = of.bincount()
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    places = torch.empty_like(of)
    # A stable sort keeps the order of equal elements.
    places[of.argsort(stable=True)] = torch.arange(len(of), device=of.device) - starts
    return places


def calls_of(heads: Sequence[GroupHead], *, own: Sequence[int], device: torch.device) -> Calls:
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
