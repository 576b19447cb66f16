"""Packs sequences into one row of tokens, with a prompt shared by several responses stored once.

A row is a list of segments: a prompt, a response that continues a prompt, or a whole sequence whose
prompt is not shared.  A response attends to its prompt and to itself, other segments to themselves.
So the row computes the same as separate sequences, without padding in the linear layers and without
repeated prompts.
Invariant: only this file knows that the hidden state of a token predicts the next token
(`predict_index`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.core.types import IntArray

_Indices = npt.NDArray[np.int64]

# A segment shorter than this share of its block's longest begins a new block. Below it, padding
# costs more than another kernel call.
_MIN_FILL = 0.6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Attention of N segments, padded to Q queries and K keys.

    Tokens of the packed row are gathered, attend, and are scattered back.  The K keys are those of
    the longest prompt followed by the segment's own, so a segment without a prompt has K = Q and is
    plainly causal.
    query_index: int64 [N * Q] and key_index: int64 [N * K], into the packed row; prefix_lengths:
    int64 [N], tokens of each prompt; bias: float32 [N, 1, Q, K] of 0 and -inf, None if no segment
    has a prompt.
    """

    query_index: Tensor
    key_index: Tensor
    prefix_lengths: Tensor
    bias: Tensor | None
    num_segments: int

    def windowed_bias(self, window: int) -> Tensor | None:
        """Return the bias of a layer in which a token attends to the `window` newest tokens.

        The window includes the token itself -> float32 [N, 1, Q, K], or None for a plainly causal
        block that fits into the window (sliding-window attention, arXiv 2310.06825 sec. 2).
        """
        num_queries = len(self.query_index) // self.num_segments
        num_keys = len(self.key_index) // self.num_segments
        if num_keys <= window:
            return self.bias
        query = torch.arange(num_queries, device=self.query_index.device)
        prompt = torch.arange(num_keys - num_queries, device=query.device)
        lengths = self.prefix_lengths[:, None]
        # Positions within the sequence: a prompt shorter than the longest ends before its padding.
        own = lengths + query
        keys = torch.cat([prompt.expand(self.num_segments, -1), own], 1)
        distance = own[:, :, None] - keys[:, None, :]
        if self.bias is None:
            bias = torch.zeros_like(distance, dtype=torch.float32)
            bias = bias.masked_fill(distance < 0, -torch.inf)
        else:
            bias = self.bias[:, 0]
        return bias.masked_fill(distance >= window, -torch.inf)[:, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The attention of a packed row of T tokens.

    output_index: int64 [T], the index of each token in the concatenated outputs of the blocks.
    """

    blocks: tuple[Block, ...]
    output_index: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass: a packed row of T tokens with S sequences and R' response tokens.

    input_ids, position_ids: int64 [1, T]
    predict_index: int64 [R'], the row index whose hidden state predicts each response token
    target_ids: int64 [R'], that token
    token_index: int64 [R'], its index in the batch's R
    last_index: int64 [S], the row index of each sequence's last token; empty without ends
    sequences: int64 [S], indices in the batch's B
    Passes are compared by identity, because they are keys of kept outputs.
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    token_index: Tensor
    last_index: Tensor
    sequences: Tensor
    layout: Layout


class _Row:
    """A row under construction. Segments are (start, length, prefix start, prefix length)."""

    def __init__(self) -> None:
        self.size = 0
        self.ids: list[IntArray] = []
        self.segments: list[tuple[int, int, int, int]] = []
        self.predict: list[_Indices] = []
        self.targets: list[IntArray] = []
        self.tokens: list[_Indices] = []
        self.last: list[int] = []

    def add_tokens(self, ids: IntArray) -> None:
        self.ids.append(ids)
        self.size += len(ids)

    def finish(self, sequences: Sequence[int], device: torch.device) -> Pass:
        def joined(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
            array = np.concatenate(arrays) if arrays else np.empty(0)
            return torch.from_numpy(array.astype(np.int64)).to(device)

        table = np.array(self.segments, dtype=np.int64)
        return Pass(
            input_ids=joined(self.ids)[None],
            position_ids=joined([_positions(table)])[None],
            predict_index=joined(self.predict),
            target_ids=joined(self.targets),
            token_index=joined(self.tokens),
            last_index=joined([np.array(self.last)]),
            sequences=joined([np.array(sequences)]),
            layout=segment_layout(table, device=device),
        )


def pack(
    batch: Batch, sequences: Sequence[int], *, device: torch.device, with_ends: bool = True
) -> Pass:
    """Pack sequences of the batch into a row; dtypes and shapes are those of `Pass`.

    with_ends: include the last token of each response. It predicts no token, so only a critic needs
    it.  Without sequences the row is one unused token, which keeps ranks in step.
    """
    row = _Row()
    if not sequences:
        row.add_tokens(np.zeros(1, dtype=np.int32))
        row.segments.append((0, 1, 0, 0))
    prompt_starts: dict[int, int] = {}
    num_users = Counter(batch.prompt_key[s] for s in sequences)
    for s in sequences:
        key, ids = batch.prompt_key[s], batch.token_ids[s]
        length, size = batch.prompt_lengths[s], batch.response_lengths[s]
        if key not in prompt_starts:
            prompt_starts[key] = row.size
            row.segments.append((row.size, length, 0, 0))
            row.add_tokens(ids[:length])
        start, begin = prompt_starts[key], row.size
        if with_ends:
            row.last.append(begin + size - 1 if size else start + length - 1)
        if not size:
            continue
        num_stored = size if with_ends else size - 1
        if num_users[key] == 1:
            # The prompt is the newest segment: one plain causal segment needs no mask.
            row.segments[-1] = (start, length + num_stored, 0, 0)
        elif num_stored:
            row.segments.append((begin, num_stored, start, length))
        row.add_tokens(ids[length : length + num_stored])
        predict = np.arange(begin - 1, begin + size - 1)
        # The first response token is predicted by the prompt's last, which may be far away.
        predict[0] = start + length - 1
        row.predict.append(predict)
        row.targets.append(ids[length:])
        row.tokens.append(np.arange(batch.offsets[s], batch.offsets[s] + size))
    return row.finish(sequences, device)


def _positions(segments: _Indices) -> _Indices:
    """The position of each token in its own sequence. segments: int64 [N, 4] in row order."""
    lengths = segments[:, 1]
    starts = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return within + np.repeat(segments[:, 3], lengths)


def segment_layout(segments: _Indices, *, device: torch.device) -> Layout:
    """Sort segments by length into blocks of similar ones.

    segments: int64 [N, 4] of (start, length, prefix start, prefix length) -> tensors of `Layout` on
    the device.
    """
    order = np.lexsort((-segments[:, 1], segments[:, 3] > 0))
    segments = segments[order]
    lengths, has_prefix = segments[:, 1], segments[:, 3] > 0
    output_index = np.empty(int(lengths.sum()), dtype=np.int64)
    blocks = []
    first, written = 0, 0
    while first < len(segments):
        longest = int(lengths[first])
        is_long = lengths[first:] >= _MIN_FILL * longest
        fits = is_long & (has_prefix[first:] == has_prefix[first])
        size = len(fits) if fits.all() else int(fits.argmin())
        blocks.append(_block(segments[first : first + size], output_index, written, device))
        first += size
        written += size * longest
    return Layout(blocks=tuple(blocks), output_index=torch.from_numpy(output_index).to(device))


def _block(members: _Indices, output_index: _Indices, written: int, device: torch.device) -> Block:
    """Pad the members to their longest, and write the indices of the block's outputs, which follow
    `written` others, into output_index.
    """
    start, length, prefix_start, prefix_length = (members[:, i, None] for i in range(4))
    num_queries, num_prefix = int(length.max()), int(prefix_length.max())
    query, prefix = np.arange(num_queries), np.arange(num_prefix)
    is_query, is_prefix = query < length, prefix < prefix_length
    # Padding repeats the segment's first token: any valid index will do, its output is not read.
    own = np.where(is_query, start + query, start)
    prompt = np.where(is_prefix, prefix_start + prefix, start)
    output_index[own[is_query]] = written + np.flatnonzero(is_query)
    bias = None
    if num_prefix:
        is_seen = np.empty((len(members), num_queries, num_prefix + num_queries), dtype=bool)
        is_seen[:, :, :num_prefix] = is_prefix[:, None]
        is_seen[:, :, num_prefix:] = np.tri(num_queries, dtype=bool)
        values = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        bias = torch.from_numpy(values[:, None]).to(device)
    return Block(
        query_index=torch.from_numpy(own.reshape(-1)).to(device),
        key_index=torch.from_numpy(np.concatenate([prompt, own], axis=1).reshape(-1)).to(device),
        prefix_lengths=torch.from_numpy(prefix_length[:, 0].copy()).to(device),
        bias=bias,
        num_segments=len(members),
    )
