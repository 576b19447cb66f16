"""Packs sequences into one row of tokens, with tokens that several sequences share stored once.

A row is a list of segments, which form trees: the first token of a segment follows a token of an
earlier segment, or nothing.  A token attends to itself and to what it follows: a response to its
prompt, a call of an agent to the part of its session that it continues.  So the row computes the
same as separate sequences, without padding in the linear layers and without repeated tokens.
Invariants
- Only this file knows that the hidden state of a token predicts the next token (`predict_index`).
- The numbers that a critic reads at a token depend on that token and on the tokens that it follows.
"""

import bisect
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_rl.algorithms.logits import Edits
from async_rl.batching.batch import Batch
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, IntArray, Trajectory

Indices = npt.NDArray[np.int64]

NUM_INPUTS = 4
"""Of a critic, next to the hidden state of a token."""


@frozen
class Pass:
    """One forward pass: a packed row of T tokens with S sequences and R' response tokens.

    input_ids, position_ids: int64 [1, T]
    predict_index: int64 [R'], the row index whose hidden state predicts each response token
    target_ids: int64 [R'], that token
    token_index: int64 [R'], its index in the batch's R
    last_index: int64 [S], the row index of each sequence's last token; empty if
    pack(with_ends=False)
    sequences: int64 [S], indices in the batch's B
    segments: int64 [N, 3] on the host, in row order: start, length, and the token that the first
    one follows, -1: none
    edits: the changes of the logits at the R' tokens, None without any
    value_inputs: float32 [T, NUM_INPUTS], None if pack(with_ends=False)
    """

    input_ids: Tensor
    position_ids: Tensor
    predict_index: Tensor
    target_ids: Tensor
    token_index: Tensor
    last_index: Tensor
    sequences: Tensor
    segments: Indices
    edits: Edits | None = None
    value_inputs: Tensor | None = None


class RowInProgress:
    """A row under construction."""

    def __init__(self) -> None:
        self.size = 0
        self.ids: list[IntArray] = []
        self.segments: list[tuple[int, int, int]] = []
        self.predict: list[Indices] = []
        self.targets: list[IntArray] = []
        self.tokens: list[Indices] = []
        self.last: list[int] = []
        self._prompt_starts: dict[Hashable, int] = {}

    def add(self, ids: IntArray, parent: int) -> None:
        """Append tokens; the first one follows the token `parent`."""
        if 0 <= parent == self.size - 1:
            # A longer segment: a kernel needs no mask for a token that follows its neighbor.
            start, length, first = self.segments[-1]
            self.segments[-1] = (start, length + len(ids), first)
        elif len(ids):
            self.segments.append((self.size, len(ids), parent))
        self.ids.append(ids)
        self.size += len(ids)

    def add_sequence(
        self,
        ids: IntArray,
        prompt_length: int,
        *,
        prompt: Hashable,
        branches: Sequence[tuple[int, int]] = (),
        with_end: bool = False,
    ) -> Indices:
        """Append a sequence whose response is predicted; return the place of each token in the row.

        prompt: equal for sequences whose prompt is stored once; branches: as in Trajectory;
        with_end: include the last token of the response, which predicts none.
        """
        is_new = prompt not in self._prompt_starts
        start = self._prompt_starts.setdefault(prompt, self.size)
        # The prompt may be far away.
        begin = self.size + is_new * prompt_length
        size = len(ids) - prompt_length
        places: Indices = np.r_[start : start + prompt_length, begin : begin + size]
        # The token that each follows: its neighbor, unless a branch says otherwise.
        parents = np.arange(-1, len(ids) - 1)
        for first, parent in branches:
            parents[first] = parent
        firsts = sorted({0, prompt_length, *dict(branches)})
        end = prompt_length + max(0, size - (not with_end))
        for first, then in itertools.pairwise([*firsts, end]):
            if first < then and (first >= prompt_length or is_new):
                parent = parents[first]
                self.add(ids[first:then], int(places[parent]) if parent >= 0 else -1)
        # A token that follows nothing is not trained, so any token may predict it.
        self.predict.append(places[parents[prompt_length:].clip(min=0)])
        self.targets.append(ids[prompt_length:])
        return places

    def finish(self, sequences: Sequence[int], device: torch.device) -> Pass:
        """Return the row; sequences: as in `Pass`."""

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
    row = RowInProgress()
    placed: list[tuple[Indices, Trajectory]] = []
    if not sequences:
        row.add(np.zeros(1, dtype=np.int32), -1)
    for s in sequences:
        sample = batch.trajectories[s]
        places = row.add_sequence(
            sample.token_ids,
            sample.prompt_length,
            prompt=batch.prompt_key[s],
            branches=sample.branches,
            with_end=with_ends,
        )
        placed.append((places, sample))
        start = batch.offsets[s]
        row.tokens.append(np.arange(start, start + sample.response_length))
        if with_ends:
            # The last token of a sequence with an empty response is the last token of its prompt.
            row.last.append(places[-1])
    packed = row.finish(sequences, device)
    if batch.edits is not None:
        packed = replace(packed, edits=batch.edits.at(packed.token_index))
    if not with_ends:
        return packed
    inputs = _value_inputs(placed, row.size, seen_by(packed.segments))
    return replace(packed, value_inputs=torch.from_numpy(inputs).to(device))


def _value_inputs(
    placed: Iterable[tuple[Indices, Trajectory]], num_tokens: int, seen: Iterable[Indices]
) -> FloatArray:
    """Return the inputs of a critic: how far a response is, and how surprising its tokens were to
    the policy that sampled them. Its log-probs are known before any pass, and are the same when the
    values are computed and when they are trained.

    placed: the sequences of the row, each with the place of every token; seen: as `seen_by`
    -> float32 [T, NUM_INPUTS].  With p the probability of a token that the policy wrote, 1 for any
    other, and over the token and those that it follows, the columns are
      the number of response tokens;  1 - p of the token;  the largest 1 - p;  log(1 - sum of log p)
    In a regression they explain as much of the returns as more statistics and the entropy do
    (docs/decisions/critic_inputs.md).
    """
    is_response = np.zeros(num_tokens)
    surprise = np.zeros(num_tokens)
    for places, sample in placed:
        is_response[places[sample.prompt_length :]] = 1.0
        surprise[places] = np.where(sample.loss_mask, -sample.behavior_logprobs, 0.0)
    unlikely = -np.expm1(-surprise)
    inputs = np.repeat(unlikely.astype(np.float32)[:, None], NUM_INPUTS, axis=1)
    for path in seen:
        # A token of several paths gets the same numbers from each.
        inputs[path, 0] = is_response[path].cumsum()
        inputs[path, 2] = np.maximum.accumulate(unlikely[path])
        inputs[path, 3] = np.log1p(surprise[path].cumsum())
    return inputs


def pack_rows(rows: Sequence[IntArray], *, prompt_length: int, device: torch.device) -> Pass:
    """Pack rows whose tokens after the prompt are predicted, in order; equal prompts once.

    rows: int32 [L] each, with at least prompt_length tokens.
    """
    row = RowInProgress()
    for ids in rows:
        row.add_sequence(ids, prompt_length, prompt=ids[:prompt_length].tobytes())
    return row.finish([], device)


def seen_by(segments: Indices) -> list[Indices]:
    """Return, for each segment, the tokens that its last token attends to, from the start of its
    sequence: those that the segment follows, and its own.  segments: int64 [N, 3] in row order.
    """
    starts = segments[:, 0].tolist()
    seen: list[Indices] = []
    for start, length, parent in segments.tolist():
        own = np.arange(start, start + length)
        if parent >= 0:
            before = seen[bisect.bisect(starts, parent) - 1]
            # Ascending, as a row has a token after all tokens that it follows.
            own = np.concatenate([before[before <= parent], own])
        seen.append(own)
    return seen


def _positions(segments: Indices) -> Indices:
    """The position of each token in its own sequence. segments: int64 [N, 3] in row order."""
    lengths = segments[:, 1]
    sizes = zip(lengths.tolist(), seen_by(segments), strict=True)
    return np.concatenate([np.arange(len(seen))[-length:] for length, seen in sizes])
