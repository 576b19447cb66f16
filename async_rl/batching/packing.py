"""Packs sequences into one row of tokens in which a prompt shared by several responses stands once.

A row is a list of segments: a prompt, a response that continues one, or a whole sequence where
nobody shares its prompt.  A response attends to its prompt and to itself, the others to themselves;
so the row computes what separate sequences would, without padding in any linear layer and without
repeating prompts. Invariant: here, and nowhere else, it is known that the hidden state of a token
predicts the next one (`predict_index`).
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
_MIN_FILL = 0.6
"""Segments shorter than this share of a block's longest begin a new block: below it, padding costs
more than another kernel call.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Attention of N segments, padded to Q queries and K keys. Rows of the packed row are gathered,
    attended, and scattered back.

    The K keys are those of the longest prompt, then the segments' own, so a segment without a
    prompt has K = Q and is plainly causal.
    query_index: int64 [N * Q]; key_index: int64 [N * K], into the packed row; prefix_lengths: int64
    [N], tokens of each prompt.
    bias: float32 [N, 1, Q, K], 0 or -inf; None where no segment has a prompt.
    """

    query_index: Tensor
    key_index: Tensor
    prefix_lengths: Tensor
    bias: Tensor | None
    num_segments: int

    def windowed_bias(self, window: int) -> Tensor | None:
        """The bias of a layer in which a token sees only the `window` newest ones, itself included:
        float32 [N, 1, Q, K].
        """
        num_queries, num_keys = (
            len(self.query_index) // self.num_segments,
            len(self.key_index) // self.num_segments,
        )
        query = torch.arange(num_queries, device=self.query_index.device)
        num_prefix = num_keys - num_queries
        if num_queries + num_prefix <= window:
            return self.bias
        prefix = self.prefix_lengths[:, None]
        keys = torch.cat(
            [
                query.new_zeros(self.num_segments, num_prefix)
                + torch.arange(num_prefix, device=query.device),
                prefix + query,
            ],
            1,
        )
        distance = (prefix + query)[:, :, None] - keys[:, None, :]
        bias = (
            self.bias[:, 0]
            if self.bias is not None
            else torch.zeros_like(distance, dtype=torch.float32).masked_fill(
                distance < 0, -torch.inf
            )
        )
        return bias.masked_fill(distance >= window, -torch.inf)[:, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who attends to whom in a packed row of T tokens.

    output_index: int64 [T], where each token's output stands in the concatenated outputs of the
    blocks.
    """

    blocks: tuple[Block, ...]
    output_index: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass, compared by identity: a packed row of T tokens that holds S sequences with
    R' response tokens.

    input_ids, position_ids: int64 [1, T].  predict_index: int64 [R'], the row position whose hidden
    state predicts each response token;
    target_ids: int64 [R'], that token; token_index: int64 [R'], its place in the batch's R.
    last_index: int64 [S], each sequence's last token, empty where rows were packed without ends;
    sequences: int64 [S], its place in the batch's B.
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    token_index: Tensor
    last_index: Tensor
    sequences: Tensor
    layout: Layout


def pack(
    batch: Batch, sequences: Sequence[int], *, device: torch.device, with_ends: bool = True
) -> Pass:
    """Packs these sequences of the batch. No sequences: a row of one token whose results nobody
    reads, to keep ranks in step.

    with_ends: keep the last token of each response, which predicts nothing; only a critic asks what
    it thinks after it.
    """
    if not sequences:
        return _idle_pass(device)
    row: list[IntArray] = []
    segments: list[tuple[int, int, int, int]] = []
    predict, targets, places, last = [], [], [], []
    prompts: dict[int, tuple[int, int]] = {}
    at = 0
    num_users = Counter(batch.prompt_key[s] for s in sequences)
    for s in sequences:
        ids, length = batch.token_ids[s], batch.prompt_lengths[s]
        if batch.prompt_key[s] not in prompts:
            prompts[batch.prompt_key[s]] = (at, length)
            segments.append((at, length, 0, 0))
            row.append(ids[:length])
            at += length
        start, _ = prompts[batch.prompt_key[s]]
        size = batch.response_lengths[s]
        if with_ends:
            last.append(at + size - 1 if size else start + length - 1)
        if not size:
            continue
        held = size if with_ends else size - 1
        if num_users[batch.prompt_key[s]] == 1:
            segments[-1] = (start, length + held, 0, 0)
        elif held:
            segments.append((at, held, start, length))
        row.append(ids[length : length + held])
        predict.append(np.arange(at - 1, at + size - 1))
        predict[-1][0] = start + length - 1
        targets.append(ids[length:])
        places.append(np.arange(batch.offsets[s], batch.offsets[s] + size))
        at += held
    table = np.array(segments, dtype=np.int64)

    def on_device(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    def joined(arrays: list[npt.NDArray[np.generic]]) -> Tensor:
        return on_device(np.concatenate(arrays) if arrays else np.empty(0))

    return Pass(
        input_ids=joined(list(row))[None],
        position_ids=on_device(_positions(table))[None],
        predict_index=joined(list(predict)),
        target_ids=joined(list(targets)),
        token_index=joined(list(places)),
        last_index=on_device(np.array(last)),
        sequences=on_device(np.array(list(sequences))),
        layout=segment_layout(table, device=device),
    )


def _idle_pass(device: torch.device) -> Pass:
    none = torch.empty(0, dtype=torch.int64, device=device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    layout = segment_layout(np.array([[0, 1, 0, 0]], dtype=np.int64), device=device)
    return Pass(
        input_ids=zero,
        position_ids=zero,
        predict_index=none,
        target_ids=none,
        token_index=none,
        last_index=none,
        sequences=none,
        layout=layout,
    )


def _positions(segments: _Indices) -> _Indices:
    """Position of each token in its own sequence. segments: [N, 4] of (start, length, prefix start,
    prefix length), in row order.
    """
    lengths = segments[:, 1]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return within + np.repeat(segments[:, 3], lengths)


def segment_layout(segments: _Indices, *, device: torch.device) -> Layout:
    """Sorts segments by length into blocks of similar ones. segments: [N, 4] of (start, length,
    prefix start, prefix length).
    """
    order = np.lexsort((-segments[:, 1], segments[:, 3] > 0))
    segments = segments[order]
    output_index = np.empty(int(segments[:, 1].sum()), dtype=np.int64)
    blocks = []
    first, written = 0, 0
    while first < len(segments):
        _, longest, _, prefix = segments[first]
        fits = (segments[first:, 1] >= _MIN_FILL * longest) & (
            (segments[first:, 3] > 0) == (prefix > 0)
        )
        size = len(fits) if fits.all() else int(fits.argmin())
        blocks.append(_block(segments[first : first + size], output_index, written, device))
        first += size
        written += size * int(longest)
    return Layout(blocks=tuple(blocks), output_index=torch.from_numpy(output_index).to(device))


def _block(members: _Indices, output_index: _Indices, written: int, device: torch.device) -> Block:
    """Pads the members to their longest and notes in output_index where the block's outputs, after
    `written` others, will stand.
    """
    start, length, prefix_start, prefix_length = (members[:, i, None] for i in range(4))
    num_queries, num_prefix = int(length.max()), int(prefix_length.max())
    query, prefix = np.arange(num_queries), np.arange(num_prefix)
    is_query, is_prefix = query < length, prefix < prefix_length
    own = np.where(is_query, start + query, start)
    keys = np.concatenate([np.where(is_prefix, prefix_start + prefix, start), own], axis=1)
    output_index[own[is_query]] = written + np.flatnonzero(is_query)
    bias = None
    if num_prefix:
        is_seen = np.empty((len(members), num_queries, num_prefix + num_queries), dtype=bool)
        is_seen[:, :, :num_prefix] = is_prefix[:, None]
        is_seen[:, :, num_prefix:] = np.tri(num_queries, dtype=bool)
        bias = torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf))[:, None]).to(
            device
        )
    return Block(
        query_index=torch.from_numpy(own.reshape(-1)).to(device),
        key_index=torch.from_numpy(keys.reshape(-1)).to(device),
        prefix_lengths=torch.from_numpy(prefix_length[:, 0].copy()).to(device),
        bias=bias,
        num_segments=len(members),
    )
