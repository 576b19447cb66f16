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
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.batching.batch import Batch
from async_rl.core.types import IntArray

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One forward pass: a packed row of T tokens with S sequences and R' response tokens.

    input_ids, position_ids: int64 [1, T]
    predict_index: int64 [R'], the row index whose hidden state predicts each response token
    target_ids: int64 [R'], that token
    token_index: int64 [R'], its index in the batch's R
    last_index: int64 [S], the row index of each sequence's last token; empty if
    pack(with_ends=False)
    sequences: int64 [S], indices in the batch's B
    segments: int64 [N, 4] on the host, in row order: start, length, and start and length of the
    prompt that the segment shares; the prompt's length is 0 if it shares none
    Passes are compared by identity, because they are keys of kept outputs.
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    token_index: Tensor
    last_index: Tensor
    sequences: Tensor
    segments: Indices


class _Row:
    """A row under construction. Segments are (start, length, prefix start, prefix length)."""

    def __init__(self) -> None:
        self.size = 0
        self.ids: list[IntArray] = []
        self.segments: list[tuple[int, int, int, int]] = []
        self.predict: list[Indices] = []
        self.targets: list[IntArray] = []
        self.tokens: list[Indices] = []
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
            segments=table,
        )


def pack(
    batch: Batch, sequences: Sequence[int], *, device: torch.device, with_ends: bool = True
) -> Pass:
    """Pack sequences of the batch into a row; dtypes and shapes as in `Pass`.

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
        key = batch.prompt_key[s]
        ids = batch.trajectories[s].token_ids
        length = batch.prompt_lengths[s]
        size = batch.response_lengths[s]
        if key not in prompt_starts:
            prompt_starts[key] = row.size
            row.segments.append((row.size, length, 0, 0))
            row.add_tokens(ids[:length])
        start = prompt_starts[key]
        begin = row.size
        if with_ends:
            # The last token of a sequence with an empty response is the last token of its prompt.
            row.last.append(begin + size - 1 if size else start + length - 1)
        if not size:
            continue
        num_stored = size if with_ends else size - 1
        # A sample of an agent: only the tokens before the first start continue the prompt.
        inner = [begin + position - length for position in batch.trajectories[s].starts]
        edges = [*inner, begin + num_stored]
        num_first = edges[0] - begin
        if num_users[key] == 1:
            # The prompt is the newest segment: one plain causal segment needs no mask.
            row.segments[-1] = (start, length + num_first, 0, 0)
        elif num_first:
            row.segments.append((begin, num_first, start, length))
        for first, then in itertools.pairwise(edges):
            # A last segment of one token predicts nothing, so it is stored only with_ends.
            if then > first:
                row.segments.append((first, then - first, 0, 0))
        row.add_tokens(ids[length : length + num_stored])
        predict = np.arange(begin - 1, begin + size - 1)
        # The first response token is predicted by the prompt's last, which may be far away.
        predict[0] = start + length - 1
        row.predict.append(predict)
        row.targets.append(ids[length:])
        row.tokens.append(np.arange(batch.offsets[s], batch.offsets[s] + size))
    return row.finish(sequences, device)


def _positions(segments: Indices) -> Indices:
    """The position of each token in its own sequence. segments: int64 [N, 4] in row order."""
    lengths = segments[:, 1]
    starts = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return within + np.repeat(segments[:, 3], lengths)
