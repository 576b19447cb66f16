"""The ranks that compute a packed row together, so that a sequence may be longer than the memory of
one rank allows.

Each rank has a piece of the row's tokens in every layer but attention. There it has all tokens of a
part of the heads, after an exchange among the ranks (DeepSpeed Ulysses, arXiv 2309.14509 sec. 3).
Invariant: outputs per response token are complete and bit-equal on all ranks of a row, and the
gradients of these ranks add up to the gradients of the row, because each rank passes on the
gradient of its tokens only.
"""

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from async_rl.batching.packing import Pass
from async_rl.core.frozen import frozen
from async_rl.learner.attention import Plan


@frozen
class Piece:
    """The tokens of a row that one rank computes.

    row: the row with these tokens alone in `input_ids`, `position_ids`, `value_inputs`,
    `predict_index`, `target_ids` and `last_index`; tokens: bool [R'], the response tokens that they
    predict; ends: bool [S], the last tokens among them. None = all.
    """

    row: Pass
    tokens: Tensor | None = None
    ends: Tensor | None = None


class Context:
    """The ranks that share rows. group: their process group; None = one rank has whole rows."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.index = 0 if group is None else group.rank()

    def piece(self, row: Pass) -> Piece:
        """Return this rank's piece of a row: consecutive tokens; the numbers of the ranks
        differ by one at most.
        """
        if self._group is None:
            return Piece(row=row)
        first, end = self._bounds(row.input_ids.shape[1])[self.index]
        tokens = (row.predict_index >= first) & (row.predict_index < end)
        ends = (row.last_index >= first) & (row.last_index < end)
        own = dataclasses.replace(
            row,
            input_ids=row.input_ids[:, first:end],
            position_ids=row.position_ids[:, first:end],
            predict_index=row.predict_index[tokens] - first,
            target_ids=row.target_ids[tokens],
            last_index=row.last_index[ends] - first,
            edits=None if row.edits is None else row.edits.at(tokens),
            value_inputs=None if row.value_inputs is None else row.value_inputs[first:end],
        )
        return Piece(row=own, tokens=tokens, ends=ends)

    def join(self, own: Tensor, members: Tensor | None) -> Tensor:
        """Return the values of all ranks: float [own] -> float [N].

        members: bool [N], the values of this rank; each of the N belongs to one rank.
        """
        if members is None:
            return own
        joined: Tensor = _Join.apply(own, members, self._group)  # type: ignore[no-untyped-call]
        return joined

    def plan(self, whole: Plan, num_tokens: int) -> Plan:
        """Return the plan that makes pieces of a row attend like the whole row."""
        if self._group is None:
            return whole
        sizes = [end - first for first, end in self._bounds(num_tokens)]
        return _ExchangePlan(whole, sizes, self._group)

    def _bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        """The first token of each rank's piece, and the first token after it."""
        # Not equal pieces of a padded row: padding would need a mask in each layer.
        edges = [num_tokens * index // self.size for index in range(self.size + 1)]
        return list(itertools.pairwise(edges))


WHOLE_ROWS = Context()
"""Every rank computes whole rows."""


def divide_ranks(
    world_size: int, context_ranks: int, device: torch.device
) -> tuple[Context, dist.ProcessGroup | None]:
    """Return this rank's context, of context_ranks consecutive ranks, and its data group, as in
    `sharding.Ranks` (collective).
    """
    if context_ranks == 1:
        return WHOLE_ROWS, None
    mesh = init_device_mesh(
        device.type,
        (world_size // context_ranks, context_ranks),
        mesh_dim_names=("data", "context"),
    )
    return Context(mesh.get_group("context")), mesh.get_group("data")


class _Join(torch.autograd.Function):
    """The sum of vectors. Each element is 0 on all ranks but one."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, members: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Fill in the own values and add up."""
        ctx.save_for_backward(members)
        # A sum and not a gather: ranks may have different numbers of response tokens.
        joined = own.new_zeros(members.shape).masked_scatter_(members, own)
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """All ranks have the same loss, so the gradient of the own values is already whole."""
        (members,) = ctx.saved_tensors
        return grads[0][members], None, None


class _ExchangePlan:
    """The attention of a row that ranks share. sizes: the tokens of each rank's piece."""

    def __init__(self, whole: Plan, sizes: list[int], group: dist.ProcessGroup) -> None:
        self._whole = whole
        self._sizes = sizes
        self._group = group
        # A rank exchanges all tokens of its piece with every rank.
        self._own_sizes = [sizes[group.rank()]] * len(sizes)

    # A graph would take the sizes of one row as constants.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `Plan.attend` of the row's piece."""
        if key.shape[1] % len(self._sizes):
            # Fewer heads of keys than ranks: each rank needs the keys of its queries.
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        query, key, value = (self._to_heads(x) for x in (query, key, value))
        return self._to_tokens(self._whole.attend(query, key, value, scaling, window))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Float [own tokens, H, D] -> float [T, H / ranks, D]."""
        by_rank = x.view(len(x), len(self._sizes), -1, x.shape[2])
        parts = by_rank.transpose(0, 1).flatten(0, 1)
        whole: Tensor = _Exchange.apply(parts, self._sizes, self._own_sizes, self._group)  # type: ignore[no-untyped-call]
        return whole

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Invert `_to_heads`."""
        parts: Tensor = _Exchange.apply(x, self._own_sizes, self._sizes, self._group)  # type: ignore[no-untyped-call]
        by_rank = parts.view(len(self._sizes), -1, *x.shape[1:])
        return by_rank.transpose(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Send consecutive rows to each rank, in `sent` numbers, and receive `received` of each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = sent, received, group
        rows = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Each rank needs the gradients of the rows that it sent.
        return _Exchange.apply(grads[0], *ctx.way_back), None, None, None  # type: ignore[no-untyped-call]
