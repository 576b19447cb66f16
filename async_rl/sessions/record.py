"""The record of one session: the token ids of everything that its calls read and wrote.

Every call of the policy is a turn. A turn continues another one if its request repeats the history
of that turn, so the turns of a session form a tree. The path from a root to a turn is exactly what
the engine saw.

Invariants
- The ids of a path are never tokenized again: a turn adds the tokens that it read and wrote.
- `row` contains each served turn once as trained tokens, and only tokens that the policy wrote.
- A path that is not part of another path is one segment. A segment repeats the tokens before it
  that another segment trains, and these have no loss there.
Pure: no clock, socket or text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.core.frozen import frozen
from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion, cut, joined, only_read

History = tuple[str, ...]
"""One key per message of a request; the first is the key of the tools."""


@frozen
class Context:
    """The input of a call.

    parent: the turn that it continues, None at a new start; num_kept: the tokens that the
    parent wrote and that precede this call; read: the further tokens, int32 [N]; token_ids: all
    tokens before the answer, int32 [M].
    """

    parent: int | None
    num_kept: int
    read: IntArray
    token_ids: IntArray


@dataclass(slots=True, kw_only=True)
class Turn:
    """One answer of the policy. answer: None while it is written, then at most `limit` tokens.

    history: the key of the request. prompt and text: of a call without messages, the text of the
    request, and with the answer as the agent saw it.
    """

    context: Context
    history: History
    limit: int
    answer: Completion | None = None
    prompt: str = ""
    text: str = ""

    @property
    def prefix_length(self) -> int:
        """Tokens before the answer."""
        return len(self.context.token_ids)

    @property
    def num_written(self) -> int:
        """Tokens of the answer; while it is written, as many as it may get."""
        return self.limit if self.answer is None else len(self.answer.token_ids)


class Record:
    """The turns of one session. prompt: the tokens of the ticket's prompt; a first
    segment may start with them.
    """

    def __init__(self, prompt: IntArray) -> None:
        self._prompt = prompt
        self._turns: dict[int, Turn] = {}
        self._numbers = itertools.count()
        self._by_history: dict[History, int] = {}

    @property
    def turns(self) -> Sequence[Turn]:
        """The served turns, in the order of the starts of their calls."""
        return [turn for turn in self._turns.values() if turn.answer is not None]

    def turn(self, number: int) -> Turn:
        """Return the turn of this number."""
        return self._turns[number]

    def is_truncated(self, number: int) -> bool:
        """Return whether the answer has no end token."""
        answer = self._turns[number].answer
        return answer is None or answer.is_truncated

    # ---- which turn a request continues

    def match(self, history: History) -> tuple[int | None, int]:
        """Return the turn that this history continues, and the entries that it repeats."""
        for size in range(len(history), 1, -1):
            number = self._by_history.get(history[:size])
            if number is not None:
                return number, size
        return None, 0

    def match_text(self, text: str) -> int | None:
        """Return the turn with the longest prompt and answer that are a prefix of this text."""
        texts = {n: t.text for n, t in self._served() if t.text and text.startswith(t.text)}
        return max(texts, key=lambda number: len(texts[number]), default=None)

    def match_ids(self, token_ids: IntArray) -> Context:
        """Return the context of a request that consists of these tokens."""
        best: int | None = None
        longest = 0
        for number, _ in self._served():
            path = self.path(number)
            is_prefix = np.array_equal(token_ids[: len(path)], path)
            if is_prefix and longest < len(path) < len(token_ids):
                best, longest = number, len(path)
        return self.context(best, token_ids[longest:])

    def repeated(self, history: History) -> int | None:
        """Return the newest turn with exactly this request that no other turn continues."""
        parents = {turn.context.parent for turn in self._turns.values()}
        same = [n for n, turn in self._served() if turn.history == history and n not in parents]
        return max(same, default=None)

    def context(
        self, parent: int | None, read: Sequence[int] | IntArray, *, num_kept: int | None = None
    ) -> Context:
        """Return the context that continues a turn with the tokens `read`.

        num_kept: the tokens of the turn's answer that remain; None = all.
        """
        read = np.asarray(read, np.int32)
        if parent is None:
            return Context(parent=None, num_kept=0, read=read, token_ids=read)
        turn = self._turns[parent]
        if num_kept is None:
            num_kept = turn.num_written
        before = self.path(parent)[: turn.prefix_length + num_kept]
        token_ids = np.concatenate([before, read])
        return Context(parent=parent, num_kept=num_kept, read=read, token_ids=token_ids)

    def path(self, number: int) -> IntArray:
        """Return the tokens from the start of the session to the end of a turn: int32 [N]."""
        turn = self._turns[number]
        assert turn.answer is not None, "only served turns are continued"
        return np.concatenate([turn.context.token_ids, turn.answer.token_ids])

    # ---- a call

    def begin(self, context: Context, history: History, *, limit: int) -> int:
        """Reserve `limit` tokens for an answer; return the number of its turn."""
        number = next(self._numbers)
        self._turns[number] = Turn(context=context, history=history, limit=limit)
        return number

    def finish(
        self, number: int, answer: Completion, *, reply: str = "", prompt: str = "", text: str = ""
    ) -> None:
        """Record the answer, which the agent may see from now on.

        reply: the key of the answer as the next request will repeat it. prompt, text: as in Turn.
        """
        turn = self._turns[number]
        turn.answer, turn.prompt, turn.text = answer, prompt, text
        if turn.history:
            self._by_history[(*turn.history, reply)] = number

    def cancel(self, number: int) -> None:
        """Forget a call whose answer the agent never sees."""
        del self._turns[number]

    def num_tokens(self, context: Context | None = None) -> int:
        """Return the length of the row, with calls in progress at their limits.

        context: of a call that starts now and has written nothing yet.
        """
        ends = self._segment_ends(context)
        total = sum(self._turns[n].prefix_length + self._turns[n].num_written for n in ends)
        is_shared = bool(ends) and self._begins_with_prompt(ends[0])
        if context is not None:
            total += len(context.token_ids)
            is_shared = is_shared or self._is_prompt(context.token_ids)
        return total - len(self._prompt) if is_shared else total

    # ---- the sample

    def row(self) -> tuple[Completion, tuple[int, ...]]:
        """Return the served turns as one row after the prompt, and the positions in it where a
        segment starts that does not continue the prompt. Raises ValueError without any turn.
        """
        ends = self._segment_ends(None)
        if not ends:
            raise ValueError("the session has no answer of the policy")
        trained: set[int] = set()
        segments = [self._segment(end, trained) for end in ends]
        row = joined(segments)
        starts = np.cumsum([0, *(len(segment.token_ids) for segment in segments[:-1])])
        # Only the first segment may continue the prompt, which is not a part of the row.
        if self._begins_with_prompt(ends[0]):
            num_prompt = len(self._prompt)
            row = cut(row, slice(num_prompt, None))
            starts = starts[1:] - num_prompt
        return row, tuple(starts.tolist())

    def _segment(self, end: int, trained: set[int]) -> Completion:
        """The path to a turn. Turns on it that are not in `trained` are trained."""
        segment = only_read(self.path(end))
        number: int | None = end
        num_kept = self._turns[end].num_written
        while number is not None:
            turn = self._turns[number]
            assert turn.answer is not None, "a parent is served before it is continued"
            # A turn that is cut here is trained whole, in a separate segment.
            if number not in trained and num_kept == turn.num_written:
                trained.add(number)
                written = slice(turn.prefix_length, turn.prefix_length + num_kept)
                segment.logprobs[written] = turn.answer.logprobs
                segment.versions[written] = turn.answer.versions
            number, num_kept = turn.context.parent, turn.context.num_kept
        return segment

    def _segment_ends(self, more: Context | None) -> list[int]:
        """The last turns of segments: no other turn continues them whole."""
        contexts = [turn.context for turn in self._turns.values()]
        if more is not None:
            contexts.append(more)
        continued = {
            context.parent
            for context in contexts
            if context.parent is not None
            and context.num_kept == self._turns[context.parent].num_written
        }
        ends = [number for number in self._turns if number not in continued]
        # The first segment continues the prompt of the row, if any of them starts with it.
        return sorted(ends, key=lambda number: not self._begins_with_prompt(number))

    def _begins_with_prompt(self, number: int) -> bool:
        return self._is_prompt(self._turns[number].context.token_ids)

    def _is_prompt(self, token_ids: IntArray) -> bool:
        return np.array_equal(token_ids[: len(self._prompt)], self._prompt)

    def _served(self) -> list[tuple[int, Turn]]:
        return [(n, turn) for n, turn in self._turns.items() if turn.answer is not None]
