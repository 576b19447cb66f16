"""The answers of agents in a batch: which tokens, rewards and roles they have.

A sequence without an agent has one call, which is all of it. The calls of one sequence with one
role are a part; each part has advantages of its own. Every rank has the calls of all sequences.
"""

import collections
from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.core.calls import AgentCall
from async_rl.core.frozen import frozen
from async_rl.core.heads import GroupHead, SampleHead


@frozen
class Calls:
    """The U trained calls of B sequences, in the order of the rows, and their P parts.

    sequence: int64 [U]; part: int64 [U]; turn: int64 [U], the place in the order of the part's
    requests; is_last: bool [U], the last of its part; rewards: float32 [U], of the call alone.
    part_sequence: int64 [P]; part_group: int64 [P], equal for parts that are compared: of one group
    and one role; num_groups: of these.
    of_tokens: int64 [R], the call of each token of the own sequences.
    """

    sequence: Tensor
    part: Tensor
    turn: Tensor
    is_last: Tensor
    rewards: Tensor
    part_sequence: Tensor
    part_group: Tensor
    num_groups: int
    of_tokens: Tensor

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
        sizes: Tensor
        numbers, row, sizes = torch.unique(
            self.part_of_tokens, return_inverse=True, return_counts=True
        )
        # The tokens row by row; a stable sort keeps their order within a row.
        order = row.argsort(stable=True)
        starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        column = torch.empty_like(row)
        column[order] = torch.arange(len(row), device=row.device) - starts
        return numbers, row, column

    def by_turn(self, of_calls: Tensor) -> Tensor:
        """Lay calls out as right-padded rows: any dtype [U] -> the same dtype [P, K]. K: the most
        calls of a part; padding is 0.
        """
        rows = of_calls.new_zeros(len(self.part_sequence), int(self.turn.max()) + 1)
        rows[self.part, self.turn] = of_calls
        return rows


def calls_of(heads: Sequence[GroupHead], *, own: Sequence[int], device: torch.device) -> Calls:
    """Return the calls of a batch. own: the numbers of the rank's sequences."""
    members = [(index, sample) for index, group in enumerate(heads) for sample in group.samples]
    parts: dict[tuple[int, str], int] = {}
    placed: list[tuple[int, int, int, int, bool, float]] = []
    for number, (_, sample) in enumerate(members):
        calls = _trained(sample)
        num_calls = collections.Counter(call.role for call in calls)
        turns = collections.Counter[str]()
        for call in calls:
            part = parts.setdefault((number, call.role), len(parts))
            turn = turns[call.role]
            turns[call.role] += 1
            is_last = turns[call.role] == num_calls[call.role]
            placed.append((number, call.end_tokens, part, turn, is_last, call.reward))
    # From the order of the requests to that of the rows.
    placed.sort()
    sequences, ends, of_parts, of_turns, lasts, rewards = zip(*placed, strict=True)
    groups: dict[tuple[int, str], int] = {}
    part_group = [
        groups.setdefault((members[number][0], role), len(groups)) for number, role in parts
    ]
    sequence = torch.tensor(sequences)
    end = torch.tensor(ends)
    lengths = torch.tensor([sample.response_length for _, sample in members])
    is_first = sequence != torch.cat([sequence[:1] - 1, sequence[:-1]])
    # Tokens after the last call are not trained; they count as its own.
    end = torch.where(is_first.roll(-1), lengths[sequence], end)
    sizes = end - torch.where(is_first, 0, end.roll(1))
    is_own = torch.zeros(len(members), dtype=torch.bool)
    is_own[list(own)] = True
    sizes = sizes.masked_fill(~is_own[sequence], 0)
    return Calls(
        sequence=sequence.to(device),
        part=torch.tensor(of_parts, device=device),
        turn=torch.tensor(of_turns, device=device),
        is_last=torch.tensor(lasts, device=device),
        rewards=torch.tensor(rewards, device=device),
        part_sequence=torch.tensor([number for number, _ in parts], device=device),
        part_group=torch.tensor(part_group, device=device),
        num_groups=len(groups),
        of_tokens=torch.arange(len(placed)).repeat_interleave(sizes).to(device),
    )


def _trained(sample: SampleHead) -> Sequence[AgentCall]:
    """The trained calls of a sequence; one that is all of it if it has none."""
    whole = AgentCall(end_tokens=sample.response_length, num_tokens=sample.response_length)
    return [call for call in sample.calls if call.end_tokens] or [whole]
