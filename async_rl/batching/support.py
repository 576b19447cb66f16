"""The tokens that could be drawn at each position, as changes of logits.

top-k, top-p, a minimum length, a bias and a grammar are one thing: at a position some tokens are
excluded, and a number is added to the logits of others. What follows from the tokens is computed
again by `Walk`, in the learner and in the transformers engine, as vLLM computes it. What top-k and
top-p leave depends on the last bits of the logits, so the engine that drew records it.

Written against xgrammar 0.2.8 and its use in vLLM 0.32.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.core.codec import encode
from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.support import EVERYTHING, Span, Support
from async_rl.core.types import FloatArray, IntArray, Trajectory

_EXCLUDED = -1e30
"""The logit of a token that cannot be drawn. With -inf, entropy and KL would be 0 times infinity.
"""
_CACHE_BYTES = 512 << 20
"""Compiled grammars, as many as vLLM keeps: agents may send any number of them."""


class Grammars:
    """Compiles grammars for the tokens of a model.

    tokenizer: its directory; has_code: that may run code of its own. It is read at the first
    grammar: most runs have none.
    """

    def __init__(self, tokenizer: str, vocab_size: int, *, has_code: bool = False) -> None:
        self._path = tokenizer
        self.vocab_size = vocab_size
        self._has_code = has_code

    @functools.cached_property
    def _compiler(self) -> Any:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            self._path, trust_remote_code=self._has_code, local_files_only=True
        )
        tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self.vocab_size)
        return xgrammar.GrammarCompiler(tokens, cache_limit_bytes=_CACHE_BYTES)

    def matcher(self, support: Support, stop_ids: Sequence[int]) -> Any:
        """Return xgrammar's matcher at the start of an answer. Raises DataError."""
        import xgrammar

        try:
            kind = support.grammar_kind.replace("json", "json_schema")
            compiled = getattr(self._compiler, f"compile_{kind}")(support.grammar)
        except (ValueError, RuntimeError) as error:
            raise DataError(f"the grammar {support.grammar[:200]!r} is refused: {error}") from error
        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)


NO_GRAMMARS = Grammars("", 0)
"""For rows without a support."""


class Walk:
    """The support of one answer, token after token, without its top-k and top-p."""

    def __init__(self, support: Support, stop_ids: Sequence[int], grammars: Grammars) -> None:
        self._bias = np.zeros(grammars.vocab_size, np.float32)
        if wrong := [i for i in support.logit_bias if not 0 <= i < len(self._bias)]:
            raise DataError(f"logit_bias of {wrong}: the model has {len(self._bias)} tokens")
        self._bias[list(support.logit_bias)] = list(support.logit_bias.values())
        self._stop_ids = list(stop_ids)
        self._num_short = support.min_tokens
        self._matcher = grammars.matcher(support, stop_ids) if support.grammar else None
        self._mask = np.full((1, -(-grammars.vocab_size // 32)), -1, np.int32)
        self._fill()

    def _fill(self) -> None:
        # vLLM constrains nothing after the end of the grammar, which an ignored end token reaches.
        if self._matcher is None or self._matcher.is_terminated():
            self._mask[:] = -1
        else:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(self._mask))

    @property
    def state(self) -> bytes:
        """Equal at positions whose tokens have equal changes."""
        mask = b"" if self._matcher is None else self._mask.tobytes()
        return mask + bytes([self._num_short > 0])

    def added(self) -> FloatArray:
        """Return what is added to the logits of the next token: float32 [V], -inf = excluded."""
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little", count=len(self._bias))
        added = np.where(bits > 0, self._bias, np.float32(-np.inf))
        if self._num_short > 0:
            stops = added[self._stop_ids]
            added[self._stop_ids] = -np.inf
            # A grammar that has ended leaves nothing but the end: vLLM then allows it.
            if np.isneginf(added).all():
                added[self._stop_ids] = stops
        return added

    def allows(self, token_id: int) -> bool:
        """Return whether the next token may be this one."""
        is_stop = self._num_short > 0 and token_id in self._stop_ids
        bit = self._mask.view(np.uint8)[0, token_id >> 3] >> (token_id & 7) & 1
        return bool(bit) and (not is_stop or bool(self.added()[token_id] > -np.inf))

    def accept(self, token_id: int) -> bool:
        """Go past the next token; return whether the grammar allows it."""
        self._num_short -= 1
        if self._matcher is None or self._matcher.is_terminated():
            return True
        is_allowed: bool = self._matcher.accept_token(token_id)
        self._fill()
        return is_allowed


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Exclude the tokens outside top_k (0 = all), and of these the tokens outside top_p.

    logits: float32 [B, V] after the temperature -> the same with -inf for excluded tokens.  Exactly
    top_k tokens stay, also among equal logits, which bfloat16 models have at every rank.
    """
    largest, ids = logits.topk(min(top_k or logits.shape[1], logits.shape[1]))
    probs = largest.softmax(-1)
    # The mass before a token decides, so the likeliest one always stays.
    largest.masked_fill_(probs.cumsum(-1) - probs >= top_p, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, largest)


def spans_of(
    support: Support, num_tokens: int, stop_ids: Sequence[int], kept: Sequence[IntArray]
) -> tuple[Span, ...]:
    """Return the spans of an answer. kept: ascending token ids at each position, if recorded."""
    if support == EVERYTHING:
        return ()
    packed = b""
    if kept:
        # Differences of ascending ids are small numbers, whose zero bytes compress well.
        steps = [np.diff(ids, prepend=0) for ids in kept]
        numbers = np.concatenate([[len(kept)], [len(ids) for ids in kept], *steps])
        packed = zlib.compress(numbers.astype("<i4").tobytes())
    span = Span(start=0, end=num_tokens, support=support, stop_ids=tuple(stop_ids), kept=packed)
    return (span,)


def kept_of(span: Span) -> list[IntArray]:
    """Return the recorded token ids of each position of a span."""
    numbers = np.frombuffer(zlib.decompress(span.kept), "<i4")
    ends = numbers[1 : numbers[0] + 1].cumsum()
    steps = np.split(numbers[numbers[0] + 1 :], ends)
    # A span that was cut has fewer positions than its record.
    return [np.cumsum(step, dtype=np.int32) for step in steps[: span.end - span.start]]


@frozen
class Edits:
    """The changes of the logits at N positions, as a table of U different ones.

    index: int64 [N], the change of each position; 0 = none.  Change u excludes all tokens but its
    ids if is_closed[u] (bool [U]), and adds values to the logits of its ids, after the temperature:
    starts[u] : starts[u + 1] of ids (int64 [M]) and values (float32 [M]); starts: int64 [U + 1].
    """

    index: Tensor
    is_closed: Tensor
    starts: Tensor
    ids: Tensor
    values: Tensor

    def at(self, index: Tensor) -> Edits:
        """Return the changes at some of the positions: int64 or bool [K]."""
        return replace(self, index=self.index[index])

    def apply(self, logits: Tensor, rows: slice) -> None:
        """Change the logits of some positions in place: float32 [rows, V], after the temperature.
        An excluded token gets -1e30.
        """
        index = self.index[rows]
        sizes = self.starts[index + 1] - self.starts[index]
        row = torch.repeat_interleave(sizes)
        first = self.starts[index] - (sizes.cumsum(0) - sizes)
        cells = torch.arange(len(row), device=row.device) + first[row]
        ids = self.ids[cells]
        changed = logits[row, ids] + self.values[cells]
        logits.masked_fill_(self.is_closed[index, None], _EXCLUDED)
        logits[row, ids] = changed


class _Table:
    """The different changes of a batch, under construction."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._is_closed = [False]
        self._ids: list[IntArray] = [np.empty(0, np.int32)]
        self._values: list[FloatArray] = [np.empty(0, np.float32)]

    def number(self, key: bytes, added: Callable[[], FloatArray]) -> int:
        """Return the number of a change. added: as in `Walk`, called for a new key."""
        if key not in self._numbers:
            values = added()
            is_allowed = values > -np.inf
            # Of the allowed and the excluded tokens the list has the fewer.
            is_closed = 2 * int(is_allowed.sum()) < len(values)
            ids = np.nonzero(is_allowed if is_closed else values)[0].astype(np.int32)
            self._numbers[key] = self.add(ids, values[ids], is_closed=is_closed)
        return self._numbers[key]

    def add(self, ids: IntArray, values: FloatArray, *, is_closed: bool) -> int:
        """Add a change and return its number."""
        if not is_closed and not len(ids):
            return 0
        self._is_closed.append(is_closed)
        self._ids.append(ids)
        self._values.append(np.maximum(values, np.float32(_EXCLUDED)))
        return len(self._ids) - 1

    def edits(self, index: IntArray, temperature: float, device: torch.device) -> Edits:
        """Return the table, with the changes of all positions."""
        sizes = [0, *(len(ids) for ids in self._ids)]
        values = torch.from_numpy(np.concatenate(self._values)).to(device)
        return Edits(
            index=torch.from_numpy(index).to(device, torch.int64),
            is_closed=torch.tensor(self._is_closed, device=device),
            starts=torch.tensor(sizes, device=device).cumsum(0),
            ids=torch.from_numpy(np.concatenate(self._ids)).to(device, torch.int64),
            values=values / temperature,
        )


def edits_of(
    trajectories: Sequence[Trajectory],
    grammars: Grammars,
    *,
    temperature: float,
    device: torch.device,
) -> tuple[Edits | None, Tensor]:
    """Return the changes of the logits at the R response tokens, None without any; and the tokens
    that their support excludes, bool [R], whose logits are not changed.

    An excluded token shows that an engine and this process disagree about a support.
    """
    table = _Table()
    index = np.zeros(sum(t.response_length for t in trajectories), np.int32)
    is_outside = np.zeros(len(index), np.bool_)
    offset = 0
    for t in trajectories:
        shift = offset - t.prompt_length
        offset += t.response_length
        for span in t.spans:
            numbers = _numbers(t.token_ids[span.start : span.end], span, grammars, table)
            own = slice(span.start + shift, span.end + shift)
            is_outside[own] = numbers < 0
            index[own] = np.maximum(numbers, 0)
    edits = table.edits(index, temperature, device) if index.any() else None
    return edits, torch.from_numpy(is_outside).to(device)


def _numbers(ids: IntArray, span: Span, grammars: Grammars, table: _Table) -> IntArray:
    """The number of the change at each token of a span; -1 = it excludes the token."""
    numbers = np.full(len(ids), -1, np.int32)
    support = span.support
    if span.kept:
        # What was kept is inside of the rest of the support already.
        for at, kept in enumerate(kept_of(span)):
            if ids[at] in kept:
                bias = [support.logit_bias.get(token_id, 0.0) for token_id in kept.tolist()]
                numbers[at] = table.add(kept, np.array(bias, np.float32), is_closed=True)
        return numbers
    walk = Walk(support, span.stop_ids, grammars)
    name = encode(span.support) + encode(span.stop_ids)
    for at, token_id in enumerate(ids.tolist()):
        number = table.number(name + walk.state, walk.added)
        if walk.allows(token_id):
            numbers[at] = number
        # After a token that its grammar refuses, the rest has no state.
        if not walk.accept(token_id):
            break
    return numbers
