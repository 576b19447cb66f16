"""Attention of a packed row on a CPU: a few calls of torch's flash kernel, each for rows of similar
size.

A segment without a shared prompt is one row under the causal triangle of the kernel. Any other
segment, and a segment longer than a sliding window, is divided into rows of a few queries with all
keys that they see, under a mask of limited size.
Invariant: memory is linear in the tokens of the row for any lengths, prompts and windows, because
the masks and the repeated keys of one kernel call are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.batching.packing import Indices

# A row shorter than this share of its part's longest starts a new part. Below it, padding costs
# more than another kernel call.
_MIN_FILL = 0.6
# Queries of a row under a mask. More would need larger masks, fewer would gather keys more often.
_ROW_QUERIES = 128
# Cells of the masks of a part, 2 MiB in float32: they and the keys of the part stay in the cache.
_PART_CELLS = 1 << 19
# The masks of rows with at most these keys are kept for all layers: 4 KB per token. A step of the
# embedded model would take a tenth longer without them.
_KEPT_KEYS = 1024
# The log-sum-exp of padding: the probability of every key is then 0, and padding has no gradient.
_INFINITE = 1e30


class Row(NamedTuple):
    """Consecutive queries of a segment, and the keys that they see, the last query included.

    first: the position of the first query among the keys.
    """

    queries: Indices
    keys: Indices
    first: int


class Part:
    """One kernel call: N rows of Q queries attend to N rows of K keys."""

    def __init__(self, rows: Sequence[Row], window: int | None, device: torch.device) -> None:
        queries, padding = _padded([row.queries for row in rows])
        keys, _ = _padded([row.keys for row in rows])
        self._shape = len(rows), queries.shape[1], keys.shape[1]
        self._window = window
        self._mask: Tensor | None = None
        self._firsts = torch.tensor([row.first for row in rows], device=device)
        self.is_causal = not _is_masked(rows[0], window)
        self.query_index = torch.from_numpy(queries.flatten()).to(device)
        self.key_index = torch.from_numpy(keys.flatten()).to(device)
        self.padding = torch.from_numpy(padding).to(device)
        """The cells among the N * Q queries that hold no query."""
        cells = np.delete(np.arange(queries.size), padding)
        self._cells = torch.from_numpy(cells).to(device)
        self._tokens = self.query_index[self._cells]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask: [N, 1, Q, K]. It hides keys after the query, so padding at the
        end of the keys is hidden too.
        """
        if self.is_causal or (self._mask is not None and self._mask.dtype is dtype):
            return self._mask
        _, num_queries, num_keys = self._shape
        device = self._firsts.device
        query = self._firsts[:, None, None] + torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(num_keys, device=device)
        is_hidden = key > query
        if self._window is not None:
            is_hidden |= key <= query - self._window
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(is_hidden, -torch.inf)[:, None]
        if num_keys <= _KEPT_KEYS:
            self._mask = mask
        return mask

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """Gather tokens: float [T, H, D] -> float [N, H, Q or K, D]."""
        gathered = x.flatten(1).index_select(0, index)
        return gathered.view(self._shape[0], -1, *x.shape[1:]).transpose(1, 2)

    def write(self, target: Tensor, values: Tensor) -> None:
        """Put values of the queries in the order of the row: [N, H, Q, ...] into [T, H, ...]."""
        values = values.transpose(1, 2).flatten(0, 1)
        if len(self.padding):
            values = values.index_select(0, self._cells)
        target.index_copy_(0, self._tokens, values)


class PartsPlan:
    """The attention of one packed row on a CPU. A window is planned for the first layer that has
    it.
    """

    def __init__(self, segments: Indices, device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._longest = int((segments[:, 1] + segments[:, 3]).max())
        self._planned: dict[int | None, list[Part]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `attention.attend` of the row."""
        out: Tensor = _PartsAttention.apply(query, key, value, self.parts(window), scaling)  # type: ignore[no-untyped-call]
        return out

    def parts(self, window: int | None) -> list[Part]:
        """Return the parts of layers with this window."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._planned:
            groups = _similar(_rows(self._segments, window), window)
            self._planned[window] = [Part(rows, window, self._device) for rows in groups]
        return self._planned[window]


def _rows(segments: Indices, window: int | None) -> Iterator[Row]:
    """Divide the segments into rows. Each token is a query once."""
    for start, length, prompt, size in segments.tolist():
        own = np.arange(start, start + length)
        if not size and (window is None or length <= window):
            yield Row(own, own, 0)
            continue
        sequence = np.concatenate([np.arange(prompt, prompt + size), own])
        for first in range(size, len(sequence), _ROW_QUERIES):
            end = min(first + _ROW_QUERIES, len(sequence))
            oldest = 0 if window is None else max(0, first - window + 1)
            yield Row(sequence[first:end], sequence[oldest:end], first - oldest)


def _is_masked(row: Row, window: int | None) -> bool:
    """Return whether the row needs another mask than the causal triangle of the kernel."""
    return row.first > 0 or (window is not None and len(row.keys) > window)


def _similar(rows: Iterable[Row], window: int | None) -> list[list[Row]]:
    """Sort rows by size into groups for one kernel call each."""

    def order(row: Row) -> tuple[bool, int, int]:
        return _is_masked(row, window), -len(row.queries), -len(row.keys)

    groups: list[list[Row]] = []
    for row in sorted(rows, key=order):
        if groups and _fits(row, groups[-1], window):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _fits(row: Row, group: Sequence[Row], window: int | None) -> bool:
    longest = group[0]
    is_masked = _is_masked(row, window)
    if is_masked != _is_masked(longest, window):
        return False
    few, many = sorted((len(row.keys), len(longest.keys)))
    num_cells = (len(group) + 1) * len(longest.queries) * many
    if is_masked and num_cells > _PART_CELLS:
        return False
    return len(row.queries) >= _MIN_FILL * len(longest.queries) and few >= _MIN_FILL * many


def _padded(rows: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Return int64 [N, L] and the cells that are padding: they repeat the row's first token."""
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    index = np.repeat(np.array([row[0] for row in rows])[:, None], lengths.max(), 1)
    index[is_real] = np.concatenate(rows)
    return index, np.flatnonzero(~is_real)


class _PartsAttention(torch.autograd.Function):
    """Float [T, H, D], [T, H_kv, D], [T, H_kv, D] -> float [T, H, D].

    Keeps these tensors and the log-sum-exp. The backward pass gathers the parts again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: list[Part],
        scaling: float | None,
    ) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        total = None
        groups = query.shape[1] // key.shape[1]
        for part in parts:
            q = part.rows(query, part.query_index)
            k, v = (_repeated(part.rows(x, part.key_index), groups) for x in (key, value))
            result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, part.is_causal, attn_mask=part.mask(q.dtype), scale=scaling
            )
            if total is None:
                # In the kernel's type: bfloat16 would round a sum to 3 digits.
                total = sums.new_empty(query.shape[:2])
            part.write(out, result)
            part.write(total, sums)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.parts = parts
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Once: checkpointing computes them again each time.
        query, key, value, out, total = ctx.saved_tensors
        groups = query.shape[1] // key.shape[1]
        of_query = torch.empty_like(out)
        # A key is in several rows, and sums in bfloat16 would lose small terms.
        of_key, of_value = (torch.zeros(x.shape, dtype=total.dtype) for x in (key, value))
        for part in ctx.parts:
            pulled, q, o = (part.rows(x, part.query_index) for x in (grads[0], query, out))
            k, v = (_repeated(part.rows(x, part.key_index), groups) for x in (key, value))
            sums = total.index_select(0, part.query_index)
            sums.index_fill_(0, part.padding, _INFINITE)
            sums = sums.view(len(q), -1, query.shape[1]).transpose(1, 2)
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
                scale=ctx.scaling,
            )
            part.write(of_query, results[0])
            for target, result in zip((of_key, of_value), results[1:], strict=True):
                added = _summed(result.transpose(1, 2).flatten(0, 1), groups)
                target.index_add_(0, part.key_index, added.to(target.dtype))
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each key head for its query heads: [N, H_kv, K, D] -> [N, H, K, D]."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Invert `_repeated` for gradients: [M, H, D] -> [M, H_kv, D]."""
    return x if groups == 1 else x.view(len(x), -1, groups, x.shape[2]).sum(2)
