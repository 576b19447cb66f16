"""Attention of a packed row on a CPU: a few calls of torch's flash kernel, each for rows of similar
size.

A segment that follows nothing is one row under the causal triangle of the kernel. Any other
segment, and a segment longer than a sliding window, is divided into rows of a few queries with all
keys that they see, under a mask of limited size.
Invariant: memory is linear in the tokens of the row for any lengths, prompts and windows, because
the masks and the repeated keys of one kernel call are bounded.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from async_rl.batching.packing import Indices, followed

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
# A part keeps its gathered keys for the backward pass if they are at most this many times its
# queries; any other part gathers them again and computes its attention twice.
_KEPT_SHARE = 4


class Row(NamedTuple):
    """Consecutive queries of a segment, and the keys that they see, the last query included.

    first: the position of the first query among the keys. is_masked: it needs another mask than
    the causal triangle of the kernel.
    """

    queries: Indices
    keys: Indices
    first: int
    is_masked: bool


class Part:
    """One kernel call: N rows of Q queries attend to N rows of K keys.

    queries: int64 [N, Q], the token of each query; is_query: bool [N, Q], False where padding
    repeats a token.
    """

    def __init__(self, rows: Sequence[Row], window: int | None) -> None:
        self.queries, self.is_query = _padded([row.queries for row in rows])
        keys, _ = _padded([row.keys for row in rows])
        self._shape = *self.queries.shape, keys.shape[1]
        self._key_index = torch.from_numpy(keys.flatten())
        self._window = window
        self._firsts = torch.tensor([row.first for row in rows])
        self._is_causal = not rows[0].is_masked
        self._mask: Tensor | None = None
        self.keeps_keys = keys.size <= _KEPT_SHARE * self.queries.size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend: float [N * Q, H, D], [T, H_kv, D], [T, H_kv, D] -> float [N * Q, H, D]."""
        key, value = (x.index_select(0, self._key_index).to(query.dtype) for x in (key, value))
        q, k, v = (
            x.view(self._shape[0], -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask_of(query.dtype),
            is_causal=self._is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask_of(self, dtype: torch.dtype) -> Tensor | None:
        """The additive mask: [N, 1, Q, K]. It hides keys after the query, so padding at the end of
        the keys is hidden too.
        """
        if self._is_causal or (self._mask is not None and self._mask.dtype is dtype):
            return self._mask
        _, num_queries, num_keys = self._shape
        query = self._firsts[:, None, None] + torch.arange(num_queries)[:, None]
        key = torch.arange(num_keys)
        is_hidden = key > query
        if self._window is not None:
            is_hidden |= key <= query - self._window
        mask = torch.zeros(is_hidden.shape, dtype=dtype)
        mask = mask.masked_fill_(is_hidden, -torch.inf)[:, None]
        if num_keys <= _KEPT_KEYS:
            self._mask = mask
        return mask


class _Parts:
    """The parts of layers with one window."""

    def __init__(self, segments: Indices, window: int | None) -> None:
        groups = _similar(_rows(segments, window))
        self._parts = [Part(rows, window) for rows in groups]
        self._sizes = [part.queries.size for part in self._parts]
        queries = np.concatenate([part.queries.flatten() for part in self._parts])
        places = np.flatnonzero(np.concatenate([part.is_query.flatten() for part in self._parts]))
        self._queries = torch.from_numpy(queries)
        # Where each token is a query; what padding computes is not read.
        self._place = torch.from_numpy(places[queries[places].argsort()])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        queries = torch.split(query.index_select(0, self._queries), self._sizes)
        # A key is in several rows, and sums of their gradients in bfloat16 would lose small terms.
        wide = torch.promote_types(key.dtype, torch.float32)
        key, value = key.to(wide), value.to(wide)
        results = []
        for part, own in zip(self._parts, queries, strict=True):
            attend = part.attend
            if not part.keeps_keys:
                # Otherwise a long response would keep its prompt's keys once per _ROW_QUERIES.
                attend = functools.partial(
                    checkpoint, part.attend, use_reentrant=False, preserve_rng_state=False
                )
            results.append(attend(own, key, value, scaling))
        return torch.cat(results).index_select(0, self._place)


class PartsPlan:
    """The attention of one packed row on a CPU. A window is planned for the first layer that has
    it.
    """

    def __init__(self, segments: Indices) -> None:
        before = followed(segments)
        self._longest = max(
            len(tokens) + length for tokens, length in zip(before, segments[:, 1], strict=True)
        )
        self._planned = functools.cache(functools.partial(_Parts, segments))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute `attention.attend` of the row."""
        if window is not None and window >= self._longest:
            window = None
        return self._planned(window).attend(query, key, value, scaling)


def _rows(segments: Indices, window: int | None) -> Iterator[Row]:
    """Divide the segments into rows. Each token is a query once."""
    for (start, length, _), before in zip(segments.tolist(), followed(segments), strict=True):
        own = np.arange(start, start + length)
        size = len(before)
        if not size and (window is None or length <= window):
            yield Row(own, own, 0, is_masked=False)
            continue
        sequence = np.concatenate([before, own])
        for first in range(size, len(sequence), _ROW_QUERIES):
            end = min(first + _ROW_QUERIES, len(sequence))
            oldest = 0 if window is None else max(0, first - window + 1)
            is_masked = first > oldest or (window is not None and end - oldest > window)
            yield Row(sequence[first:end], sequence[oldest:end], first - oldest, is_masked)


def _similar(rows: Iterable[Row]) -> list[list[Row]]:
    """Sort rows by size into groups for one kernel call each."""

    def order(row: Row) -> tuple[bool, int, int]:
        return row.is_masked, -len(row.queries), -len(row.keys)

    groups: list[list[Row]] = []
    for row in sorted(rows, key=order):
        if groups and _fits(row, groups[-1]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _fits(row: Row, group: Sequence[Row]) -> bool:
    longest = group[0]
    if row.is_masked != longest.is_masked:
        return False
    few, many = sorted((len(row.keys), len(longest.keys)))
    num_cells = (len(group) + 1) * len(longest.queries) * many
    if row.is_masked and num_cells > _PART_CELLS:
        return False
    return len(row.queries) >= _MIN_FILL * len(longest.queries) and few >= _MIN_FILL * many


def _padded(rows: Sequence[Indices]) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Return int64 [N, L] and the cells that are no padding, bool [N, L]. Padding repeats the row's
    first token.
    """
    lengths = np.array([len(row) for row in rows])
    is_real = np.arange(lengths.max()) < lengths[:, None]
    index = np.repeat(np.array([row[0] for row in rows])[:, None], lengths.max(), 1)
    index[is_real] = np.concatenate(rows)
    return index, is_real
