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

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from async_rl.core.frozen import frozen
from async_rl.core.support import Span
from async_rl.core.types import IntArray
from async_rl.protocol.generator import Completion, cut, joined, moved, only_read

History = tuple[str, ...]
"""One key per message of a request; the first is the key of the tools."""


@frozen
class Context:
    """The input of a call.

    parent: the turn that it continues, None at a new start; num_kept: the tokens that the
    parent wrote and that precede this call; token_ids: all tokens before the answer, int32 [M].
    """

    parent: int | None
    num_kept: int
    token_ids: IntArray


@dataclass(slots=True)
class _Open:
    """A call whose answer is being written. size: the tokens that are reserved for it."""

    context: Context
    history: History
    size: int = 0


@frozen
class Turn:
    """One answer of the policy that was served.

    history: the key of the request.
    """

    context: Context
    history: History
    answer: Completion

    @property
    def path(self) -> IntArray:
        """The tokens from the start of the session to the end of the turn: int32 [N]."""
        return np.concatenate([self.context.token_ids, self.answer.token_ids])


class Record:
    """The turns of one session. prompt: the tokens of the ticket's prompt; a first
    segment may start with them.
    """

    def __init__(self, prompt: IntArray) -> None:
        self._prompt = prompt
        self.turns: dict[int, Turn] = {}
        """The served turns by the numbers of their calls."""
        self.texts: dict[str, tuple[int, str]] = {}
        """Of calls without messages: a text that the agent may continue -> the turn, and the part
        of the text that the turn wrote.
        """
        self._open: dict[int, _Open] = {}
        self._by_history: dict[History, int] = {}

    # ---- which turn a request continues

    def match(self, history: History) -> tuple[int | None, int]:
        """Return the turn that this history continues, and the entries that it repeats."""
        for size in range(len(history), 1, -1):
            number = self._by_history.get(history[:size])
            if number is not None:
                return number, size
        return None, 0

    def match_ids(self, token_ids: IntArray) -> Context:
        """Return the context of a request that consists of these tokens."""
        best: int | None = None
        longest = 0
        for number, turn in list(self.turns.items()):
            path = turn.path
            is_prefix = np.array_equal(token_ids[: len(path)], path)
            if is_prefix and longest < len(path) < len(token_ids):
                best, longest = number, len(path)
        return self.context(best, token_ids[longest:])

    def is_continued(self, number: int) -> bool:
        """Return whether a turn or a call in progress continues this turn."""
        calls: list[Turn | _Open] = [*self.turns.values(), *self._open.values()]
        return any(call.context.parent == number for call in calls)

    def context(
        self, parent: int | None, read: Sequence[int] | IntArray, *, num_kept: int | None = None
    ) -> Context:
        """Return the context that continues a turn with the tokens `read`.

        num_kept: the tokens of the turn's answer that remain; None = all.
        """
        read = np.asarray(read, np.int32)
        if parent is None:
            return Context(parent=None, num_kept=0, token_ids=read)
        turn = self.turns[parent]
        if num_kept is None:
            num_kept = len(turn.answer.token_ids)
        before = turn.path[: len(turn.context.token_ids) + num_kept]
        token_ids = np.concatenate([before, read])
        return Context(parent=parent, num_kept=num_kept, token_ids=token_ids)

    # ---- a call

    def begin(self, number: int, context: Context, history: History) -> None:
        """Start a call, whose answer has no tokens yet."""
        self._open[number] = _Open(context, history)

    def reserve(self, number: int, size: int) -> None:
        """Let the answer of a call have this many tokens: calls at the same time must not fill the
        same room.
        """
        self._open[number].size = size

    def finish(self, number: int, answer: Completion, *, reply: str) -> None:
        """Record the answer, which the agent may see from now on.

        reply: the key of the answer as the next request will repeat it.
        """
        call = self._open.pop(number)
        self.turns[number] = Turn(context=call.context, history=call.history, answer=answer)
        if call.history:
            self._by_history[(*call.history, reply)] = number

    def cancel(self, number: int) -> None:
        """Forget a call whose answer the agent never sees."""
        self._open.pop(number, None)
        self.turns.pop(number, None)
        self._by_history = {key: n for key, n in self._by_history.items() if n != number}
        self.texts = {text: turn for text, turn in self.texts.items() if turn[0] != number}

    def num_tokens(self, context: Context | None = None) -> int:
        """Return the length of the row, with what is reserved for calls in progress.

        context: of a call that starts now and has written nothing yet.
        """
        calls = [(call.context, call.size) for call in self._open.values()]
        if context is not None:
            calls.append((context, 0))
        ends = self._segment_ends([context for context, _ in calls])
        total = sum(len(self.turns[end].path) for end in ends)
        total += sum(len(context.token_ids) + size for context, size in calls)
        starts = [*(self.turns[end].context for end in ends), *(context for context, _ in calls)]
        # One segment continues the prompt, which is not a part of the row.
        return total - len(self._prompt) if any(map(self._has_prompt, starts)) else total

    # ---- the sample

    def row(self) -> tuple[Completion, tuple[int, ...]]:
        """Return the served turns as one row after the prompt, and the positions in it where a
        segment starts that does not continue the prompt. Raises ValueError without any turn.
        """
        ends = self._segment_ends()
        if not ends:
            raise ValueError("the session has no answer of the policy")
        trained: set[int] = set()
        segments = [self._segment(end, trained) for end in ends]
        row = joined(segments)
        starts = np.cumsum([0, *(len(segment.token_ids) for segment in segments[:-1])])
        # Only the first segment may continue the prompt, which is not a part of the row.
        if self._has_prompt(self.turns[ends[0]].context):
            num_prompt = len(self._prompt)
            row = cut(row, slice(num_prompt, None))
            starts = starts[1:] - num_prompt
        return row, tuple(starts.tolist())

    def _segment(self, end: int, trained: set[int]) -> Completion:
        """The path to a turn. Turns on it that are not in `trained` are trained."""
        segment = only_read(self.turns[end].path)
        number: int | None = end
        num_kept = len(self.turns[end].answer.token_ids)
        spans: tuple[Span, ...] = ()
        while number is not None:
            turn = self.turns[number]
            # A turn that is cut here is trained whole, in a separate segment.
            if number not in trained and num_kept == len(turn.answer.token_ids):
                trained.add(number)
                num_before = len(turn.context.token_ids)
                written = slice(num_before, num_before + num_kept)
                segment.logprobs[written] = turn.answer.logprobs
                segment.versions[written] = turn.answer.versions
                spans = (*(moved(span, num_before) for span in turn.answer.spans), *spans)
            number, num_kept = turn.context.parent, turn.context.num_kept
        return msgspec.structs.replace(segment, spans=spans)

    def _segment_ends(self, more: Sequence[Context] = ()) -> list[int]:
        """The last turns of segments: no other turn or call in `more` continues them whole."""
        contexts = [*(turn.context for turn in self.turns.values()), *more]
        continued = {
            context.parent
            for context in contexts
            if context.parent is not None
            and context.num_kept == len(self.turns[context.parent].answer.token_ids)
        }
        ends = self.turns.keys() - continued
        # The first segment continues the prompt of the row, if any of them starts with it; the
        # other segments are in the order of their calls.
        return sorted(ends, key=lambda end: (not self._has_prompt(self.turns[end].context), end))

    def _has_prompt(self, context: Context) -> bool:
        return np.array_equal(context.token_ids[: len(self._prompt)], self._prompt)
