"""The tokens that could be drawn at each position, as changes of logits.

top-k, top-p, a minimum length, a bias and a grammar are one thing: at a position some tokens are
excluded, and a number is added to the logits of others. What follows from the tokens is computed
again by `Walk`, in the learner and in the transformers engine, as vLLM computes it. What top-k and
top-p leave depends on the last bits of the logits, so the engine that drew records it.

Written against xgrammar 0.2.8 and its use in vLLM 0.32.
"""

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.logits import EXCLUDED, Edits
from async_rl.core.calls import EVERYTHING, Span, Support
from async_rl.core.codec import encode
from async_rl.core.errors import ConfigError, DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, IntArray, Trajectory


@frozen
class Grammars:
    """Compiles grammars for the tokens of a model.

    tokenizer: its directory; has_code: that may run code of its own. It is read at the first
    grammar: most runs have none.
    """

    tokenizer: str = ""
    vocab_size: int = 0
    has_code: bool = False

    def matcher(self, support: Support, stop_ids: Sequence[int]) -> Any:
        """Return xgrammar's matcher at the start of an answer. Raises DataError."""
        import xgrammar

        compiled = compile_grammar(support, _compiler(self))
        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_ids) or None)

    def require(self, supports: Iterable[Support]) -> None:
        """Raise ConfigError for a grammar that fails with the tokens of the model. Some schemas
        compile without them only (xgrammar 0.2.8).
        """
        for support in supports:
            if support.grammar:
                try:
                    self.matcher(support, ())
                except DataError as error:
                    raise ConfigError(f"with the tokens of {self.tokenizer} {error}") from error


def compile_grammar(support: Support, compiler: Any = None) -> Any:
    """Return the grammar for the tokens of xgrammar's compiler (None = no tokens). Raises DataError
    if xgrammar refuses the grammar.
    """
    import xgrammar

    compiler = compiler or xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([]))
    try:
        kind = support.grammar_kind.replace("json", "json_schema")
        return getattr(compiler, f"compile_{kind}")(support.grammar)
    except (ValueError, RuntimeError) as error:
        # xgrammar's reasons have line breaks.
        reason = " ".join(str(error).split())
        raise DataError(f"the grammar {support.grammar[:200]!r} is refused: {reason}") from error


@functools.cache
def _compiler(of: Grammars) -> Any:
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        of.tokenizer, trust_remote_code=of.has_code, local_files_only=True
    )
    tokens = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=of.vocab_size)
    # As many as vLLM keeps: agents may send any number of grammars.
    return xgrammar.GrammarCompiler(tokens, cache_limit_bytes=512 << 20)


NO_GRAMMARS = Grammars()
"""For rows without a support."""


class Walk:
    """The support of one answer, token after token, without its top-k and top-p."""

    def __init__(self, support: Support, stop_ids: Sequence[int], grammars: Grammars) -> None:
        self._bias = np.zeros(grammars.vocab_size, np.float32)
        try:
            self._bias[list(support.logit_bias)] = list(support.logit_bias.values())
        except IndexError as error:
            raise DataError(f"logit_bias is refused: {error}") from error
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
        words = self._mask.view(np.uint8)[0]
        bits = np.unpackbits(words, bitorder="little", count=len(self._bias))
        added = np.where(bits > 0, self._bias, np.float32(-np.inf))
        if self._num_short > 0:
            stops = added[self._stop_ids]
            added[self._stop_ids] = -np.inf
            # A grammar that has ended leaves nothing but the end: vLLM then allows it.
            if np.isneginf(added).all():
                added[self._stop_ids] = stops
        return added

    def accept(self, token_id: int) -> bool:
        """Go past the next token; return whether it could be drawn."""
        is_allowed = True
        if self._num_short > 0 and token_id in self._stop_ids:
            is_allowed = bool(self.added()[token_id] > -np.inf)
        self._num_short -= 1
        if self._matcher is not None and not self._matcher.is_terminated():
            is_allowed &= self._matcher.accept_token(token_id)
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


_Change = tuple[bool, IntArray, FloatArray]
"""Entries of is_closed, ids and values."""


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
    table: list[_Change] = [(False, np.empty(0, np.int32), np.empty(0, np.float32))]
    known: dict[bytes, int] = {}
    index = np.zeros(sum(t.response_length for t in trajectories), np.int64)
    is_outside = np.zeros(len(index), np.bool_)
    shift = 0
    for t in trajectories:
        shift -= t.prompt_length
        for span in t.spans:
            is_outside[span.start + shift : span.end + shift] = True
            ids = t.token_ids[span.start : span.end].tolist()
            for at, number in enumerate(_numbers(ids, span, grammars, table, known)):
                index[span.start + shift + at] = number
                is_outside[span.start + shift + at] = not number
        shift += len(t.token_ids)
    edits = None
    if len(table) > 1:
        is_closed, ids, values = zip(*table, strict=True)
        added = torch.from_numpy(np.concatenate(values)).to(device, torch.float32)
        edits = Edits(
            index=torch.from_numpy(index).to(device),
            is_closed=torch.tensor(is_closed, device=device),
            starts=torch.tensor([0, *map(len, ids)], device=device).cumsum(0),
            ids=torch.from_numpy(np.concatenate(ids)).to(device, torch.int32),
            values=added.clamp_min(EXCLUDED) / temperature,
        )
    return edits, torch.from_numpy(is_outside).to(device)


def _numbers(
    ids: list[int],
    span: Span,
    grammars: Grammars,
    table: list[_Change],
    known: dict[bytes, int],
) -> Iterator[int]:
    """Yield the number in the table of the change at each token of a span, 0 if it excludes the
    token. It ends early after a token that the state of its grammar does not survive.

    known: the numbers of equal states of a grammar, which are one change.
    """
    support = span.support
    if span.kept:
        # The kept tokens satisfy the rest of the support already.
        for token_id, kept in zip(ids, kept_of(span), strict=True):
            bias = np.array([support.logit_bias.get(i, 0.0) for i in kept.tolist()])
            table.append((True, kept, bias))
            yield len(table) - 1 if token_id in kept else 0
        return
    walk = Walk(support, span.stop_ids, grammars)
    name = encode(support)
    for token_id in ids:
        key = name + walk.state
        if key not in known:
            known[key] = len(table)
            table.append(_change(walk.added()))
        if not walk.accept(token_id):
            return
        yield known[key]


def _change(added: FloatArray) -> _Change:
    is_allowed = added > -np.inf
    # The list has the allowed or the excluded tokens, whichever are fewer.
    is_closed = 2 * int(is_allowed.sum()) < len(added)
    ids = np.nonzero(is_allowed if is_closed else added)[0].astype(np.int32)
    return is_closed, ids, added[ids]
