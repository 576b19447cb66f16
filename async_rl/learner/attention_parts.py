"""Attention of a packed row on a CPU: batched kernel calls whose results are merged.

Every token attends to its own segment causally, and a response also to the prompt that it shares.
Each is a part with its own kernel call, and needs no mask of queries by keys. Parts merge by their
log-sum-exp: with s_i the log-sum-exp of part i and o_i its output,
  s = log sum_i exp(s_i),  o = sum_i exp(s_i - s) o_i   (arXiv 2205.14135 sec. 3.1).
The backward pass runs each kernel with the merged s and o, whose gradients are then exact.
Short responses are cheaper in one call with their prompt, under a mask of limited width.
attention_stages.py divides a row into parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_rl.core.frozen import frozen

# The log-sum-exp of a token without keys in a part. Infinity would make 0 x inf where no part of a
# token has been merged yet.
_NOTHING = -1e30


@frozen
class Part:
    """One kernel call: N rows of Q queries attend to N rows of K keys of the packed row.

    query_index: int64 [N * Q]; key_index: int64 [N * K]; padding: int64, the cells among N * Q that
    hold no query; is_causal: query i sees keys up to i; bias: float32 [N, 1, 1 or Q,
    K] of 0 and -inf, or None; window: None, or the newest keys that a query sees and the position
    of the first query among the keys.
    """

    num_rows: int
    query_index: Tensor
    key_index: Tensor
    padding: Tensor
    is_causal: bool
    bias: Tensor | None = None
    window: tuple[int, int] | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask of the kernel. All rows of a window share it."""
        if self.window is None:
            return None if self.bias is None else self.bias.to(dtype)
        window, first = self.window
        device = self.key_index.device
        query = torch.arange(len(self.query_index) // self.num_rows, device=device)[:, None] + first
        key = torch.arange(len(self.key_index) // self.num_rows, device=device)
        is_seen = (key <= query) & (key > query - window)
        bias = torch.zeros(is_seen.shape, dtype=dtype, device=device)
        return bias.masked_fill_(~is_seen, -torch.inf)[None, None]

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Gather tokens: float [T, H, D] -> float [N, H, Q or K, D]."""
        gathered = x.flatten(1).index_select(0, index)
        return gathered.view(self.num_rows, -1, *x.shape[1:]).transpose(1, 2)


@frozen
class Stage:
    """Parts that together have each token as a query at most once.

    query_cells: int64 [T], the cell of each token among the queries of all parts; key_cells: the
    same among the keys, None if a token is a key of several rows. Tokens without a cell have the
    number of cells (`covers_all` is False if there are any).
    """

    parts: tuple[Part, ...]
    query_cells: Tensor
    key_cells: Tensor | None
    has_all_queries: bool
    has_all_keys: bool

    def scatter(self, cells: list[Tensor], *, empty: float = 0.0) -> Tensor:
        """Put the results of the queries of all parts in the order of the row: [T, ...]."""
        return _scatter(cells, self.query_cells, empty, is_complete=self.has_all_queries)

    def scatter_keys(self, cells: list[Tensor], num_tokens: int) -> Tensor:
        """Add up the gradients of the keys of all parts by token: [T, ...]."""
        if self.key_cells is not None:
            return _scatter(cells, self.key_cells, 0.0, is_complete=self.has_all_keys)
        total = cells[0].new_zeros(num_tokens, *cells[0].shape[1:])
        for part, values in zip(self.parts, cells, strict=True):
            total.index_add_(0, part.key_index, values)
        return total


def _scatter(cells: list[Tensor], index: Tensor, empty: float, *, is_complete: bool) -> Tensor:
    if not is_complete:
        cells = [*cells, cells[0].new_full((1, *cells[0].shape[1:]), empty)]
    # A concatenation of one tensor would still copy it.
    joined = cells[0] if len(cells) == 1 else torch.cat(cells)
    return joined.index_select(0, index)


class PartsAttention(torch.autograd.Function):
    """Float [T, H, D], [T, H_kv, D], [T, H_kv, D] -> float [T, H, D].

    Keeps these tensors and the log-sum-exp. The backward pass gathers the parts again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stages: list[Stage],
        scaling: float | None,
    ) -> Tensor:
        """Merge the stages."""
        out, total = _stage_forward(stages[0], query, key, value, scaling)
        for stage in stages[1:]:
            more, more_total = _stage_forward(stage, query, key, value, scaling)
            share = torch.sigmoid(more_total - total)[..., None]
            # The share in the precision of the sums: bfloat16 would round it to 3 digits.
            out = torch.lerp(out.to(share.dtype), more.to(share.dtype), share).to(query.dtype)
            total = torch.logaddexp(total, more_total)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.stages, ctx.scaling = stages, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the gradients of the stages."""
        # Once: checkpointing computes them again each time.
        saved = ctx.saved_tensors
        gradients: list[Tensor] = []
        for stage in ctx.stages:
            added = _stage_backward(stage, grads[0], saved, ctx.scaling)
            if not gradients:
                gradients = added
                continue
            for total, more in zip(gradients, added, strict=True):
                total += more
        return *gradients, None, None


def _stage_forward(
    stage: Stage, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Float [T, H, D] and its log-sum-exp [T, H]."""
    outputs, totals = [], []
    groups = query.shape[1] // key.shape[1]
    for part in stage.parts:
        q = part.rows(query, part.query_index)
        k, v = (_repeated(part.rows(x, part.key_index), groups) for x in (key, value))
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, part.is_causal, attn_mask=part.mask(q.dtype), scale=scaling
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        totals.append(total.transpose(1, 2).flatten(0, 1))
    return stage.scatter(outputs), stage.scatter(totals, empty=_NOTHING)


def _stage_backward(
    stage: Stage, grad: Tensor, saved: Sequence[Tensor], scaling: float | None
) -> list[Tensor]:
    """The gradients of query, key and value."""
    query, key, value, out, total = saved
    groups = query.shape[1] // key.shape[1]
    cells: tuple[list[Tensor], ...] = ([], [], [])
    for part in stage.parts:
        index = part.query_index
        pulled, q, o = (part.rows(x, index) for x in (grad, query, out))
        k, v = (_repeated(part.rows(x, part.key_index), groups) for x in (key, value))
        sums = total.index_select(0, index)
        # Padding then has probability 0 everywhere, so that it has no gradient.
        sums.index_fill_(0, part.padding, -_NOTHING)
        sums = sums.view(part.num_rows, -1, query.shape[1]).transpose(1, 2)
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            pulled,
            q,
            k,
            v,
            o,
            sums,
            0.0,
            part.is_causal,
            attn_mask=part.mask(q.dtype),
            scale=scaling,
        )
        for gathered, result, repeats in zip(cells, results, (1, groups, groups), strict=True):
            gathered.append(_summed(result.transpose(1, 2).flatten(0, 1), repeats))
    of_query, of_key, of_value = cells
    return [
        stage.scatter(of_query),
        stage.scatter_keys(of_key, len(key)),
        stage.scatter_keys(of_value, len(key)),
    ]


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each key head for its query heads: [N, H_kv, K, D] -> [N, H, K, D]."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Invert `_repeated` for gradients: [M, H, D] -> [M, H_kv, D]."""
    return x if groups == 1 else x.view(len(x), -1, groups, x.shape[2]).sum(2)
