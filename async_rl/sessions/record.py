"""The record of one session: the token ids of everything that its calls read and wrote, as a tree.

Every call adds the tokens that it reads and that no earlier call has read or written after the same
tokens, and then its answer. So tokens at the beginning of several calls are recorded once. Only a
common beginning can be shared: a token depends on all tokens before it.

Invariants
- The ids of a call are never tokenized again: it adds the tokens that it read and wrote.
- `row` contains each turn that is to be trained once as trained tokens, and only tokens that the
  policy wrote.
  Two turns that wrote equal tokens in the same place are both in it.
Pure: no clock, socket or text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from async_rl.core.types import Branch, IntArray
from async_rl.protocol.generator import Completion, joined, only_read
from async_rl.sessions.calls import Call, Caller, Context


def following(history: bytes, key: str) -> bytes:
    """Return the digest of a history that has one more entry. A digest of each beginning costs one
    pass over the messages, and a session keeps no text.
    """
    return hashlib.blake2b(history + key.encode(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class _Run:
    """Tokens in succession, after `begin` tokens: those of `before`, None without any, and those
    that it follows.
    """

    before: _Run | None
    begin: int
    tokens: Completion

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens.token_ids)


_Place = tuple[_Run | None, int]
"""A run, and the number of tokens up to a position in it: where other tokens may follow."""


@dataclass(slots=True, eq=False)
class Writing:
    """An answer that is being written at this place.

    size: the tokens reserved for it. waits: for the room of other calls.
    """

    number: int
    call: Call
    place: _Place
    size: int = 0
    waits: bool = False

    @property
    def caller(self) -> Caller:
        """Whom it answers."""
        return self.call.caller


@dataclass(slots=True)
class Turn:
    """One answer of the policy that was served.

    parent: as in Context.
    """

    parent: int | None
    run: _Run
    caller: Caller
    text: str

    @property
    def place(self) -> _Place:
        """The end of the answer."""
        return self.run, self.run.end

    @property
    def answer(self) -> Completion:
        """The tokens of the answer."""
        return self.run.tokens

    @property
    def path(self) -> IntArray:
        """The tokens from the start of the session to the end of the turn: int32 [N]."""
        parts = []
        run: _Run | None = self.run
        end = self.run.end
        while run is not None:
            parts.append(run.tokens.token_ids[: end - run.begin])
            end = run.begin
            run = run.before
        return np.concatenate(parts[::-1])


class Record:
    """The turns of one session. prompt: the tokens of the ticket's prompt."""

    def __init__(self, prompt: IntArray) -> None:
        self.prompt = prompt
        self._prompt = _Run(None, 0, only_read(prompt))
        self._runs = [self._prompt]
        """A run follows the run that it continues."""
        self.turns: dict[int, Turn] = {}
        """The served turns by the numbers of their calls."""
        self.texts: dict[str, tuple[int, str]] = {}
        """Of calls without messages: a text that the agent may continue -> the turn, and the part
        of the text that the turn wrote.
        """
        self.writing: dict[int, Writing] = {}
        """The calls in progress."""
        self._by_history: dict[bytes, int] = {}

    # ---- which turn a request continues

    def match(self, beginnings: Sequence[bytes]) -> tuple[int | None, int]:
        """Return the turn that a history continues, and the entries that it repeats. beginnings:
        their digests; the first has the tools only.
        """
        for size in range(len(beginnings), 1, -1):
            number = self._by_history.get(beginnings[size - 1])
            if number is not None:
                return number, size
        return None, 0

    def match_ids(self, token_ids: IntArray) -> Context:
        """Return the context of a request that consists of these tokens."""
        ends = self._matching(token_ids)
        # A copy: the tokens of a large body are matched on a thread.
        repeated = {
            turn.run.end: number
            for number, turn in list(self.turns.items())
            if ends.get(turn.run) == turn.run.end < len(token_ids)
        }
        return Context(parent=repeated[max(repeated)] if repeated else None, token_ids=token_ids)

    def is_continued(self, number: int) -> bool:
        """Return whether a turn or a call in progress continues this turn."""
        contexts = [now.call.context.parent for now in self.writing.values()]
        return number in contexts or any(turn.parent == number for turn in self.turns.values())

    def context(
        self, parent: int | None, read: Sequence[int] | IntArray, *, num_kept: int | None = None
    ) -> Context:
        """Return the context that continues a turn with the tokens `read`.

        num_kept: the tokens of the turn's answer that remain; None = all.
        """
        read = np.asarray(read, np.int32)
        if parent is None:
            return Context(parent=None, token_ids=read)
        turn = self.turns[parent]
        end = turn.run.end if num_kept is None else turn.run.begin + num_kept
        return Context(parent=parent, token_ids=np.concatenate([turn.path[:end], read]))

    # ---- a call

    def begin(self, number: int, call: Call) -> Writing:
        """Start a call, whose answer has no tokens yet."""
        token_ids = call.context.token_ids
        run, end = self._place(call.context)
        if end < len(token_ids):
            run = _Run(run, end, only_read(token_ids[end:]))
            self._runs.append(run)
        self.writing[number] = Writing(number, call, (run, len(token_ids)))
        return self.writing[number]

    def finish(self, number: int, answer: Completion, text: str, *, reply: str) -> None:
        """Record the answer, which the agent may see from now on.

        reply: the key of the answer as the next request will repeat it.
        """
        now = self.writing.pop(number)
        run = _Run(*now.place, answer)
        self._runs.append(run)
        self.turns[number] = Turn(now.call.context.parent, run, now.caller, text)
        if now.call.history:
            self._by_history[following(now.call.history, reply)] = number

    def cancel(self, number: int) -> None:
        """Forget a call whose answer the agent never sees."""
        self.writing.pop(number, None)
        self.turns.pop(number, None)
        self._by_history = {key: n for key, n in self._by_history.items() if n != number}
        self.texts = {text: turn for text, turn in self.texts.items() if turn[0] != number}
        sizes = self._sizes(call.place for call in self._calls)
        self._runs = [run for run in self._runs if sizes[run] or run is self._prompt]

    def num_turns(self, caller: Caller) -> int:
        """Return the calls, complete or in progress, that are trained, or that are not, as those of
        this caller.
        """
        return sum(call.caller.is_trained is caller.is_trained for call in self._calls)

    def num_tokens_with(self, now: Writing) -> int:
        """Return the tokens that count against the limit of a call in progress."""
        if now.caller.is_trained:
            return self.num_tokens()
        return len(now.call.context.token_ids) + now.size

    def num_tokens_for(self, call: Call) -> int:
        """Return the same of a call that starts now and has written nothing yet."""
        size = len(call.context.token_ids)
        if not call.caller.is_trained:
            return size
        place = self._place(call.context)
        return self.num_tokens(place) + size - place[1]

    def num_tokens(self, *more: _Place) -> int:
        """Return the length of the row up to its calls and further places, with what is reserved
        for calls in progress.
        """
        trained = [call for call in self._calls if call.caller.is_trained]
        sizes = self._sizes([*more, *(call.place for call in trained)])
        reserved = sum(call.size for call in trained if isinstance(call, Writing))
        return reserved + sum(sizes.values()) - sizes[self._prompt]

    def _matching(self, token_ids: IntArray) -> dict[_Run, int]:
        """Return where each run stops to be the beginning of these tokens; without the runs that
        follow other tokens.
        """
        ends: dict[_Run, int] = {}
        for run in list(self._runs):
            if run.before is None or ends.get(run.before, -1) >= run.begin:
                wanted = token_ids[run.begin : run.end]
                differs = run.tokens.token_ids[: len(wanted)] != wanted
                ends[run] = run.begin + (int(differs.argmax()) if differs.any() else len(wanted))
        return ends

    def _place(self, context: Context) -> _Place:
        """Return where the tokens of a context leave the record."""
        ends = self._matching(context.token_ids)
        run = max(ends, key=lambda run: ends[run])
        return (run, ends[run]) if ends[run] else (None, 0)

    @property
    def _calls(self) -> list[Turn | Writing]:
        """All calls, complete or in progress."""
        return [*self.turns.values(), *self.writing.values()]

    def _sizes(self, places: Iterable[_Place]) -> dict[_Run, int]:
        """Return how many tokens of each run are on the way to one of these places."""
        ends = {run: run.begin for run in self._runs}
        for run, end in places:
            if run is not None:
                ends[run] = max(ends[run], end)
        for run in reversed(self._runs):
            if run.before is not None and ends[run] > run.begin:
                ends[run.before] = max(ends[run.before], run.begin)
        return {run: end - run.begin for run, end in ends.items()}

    # ---- the sample

    def row(self) -> tuple[Completion, tuple[Branch, ...], dict[int, int]]:
        """Return the trained turns as one row after the prompt, the branches of the row, and the
        end of each trained turn in it. Raises ValueError without any.
        """
        turns = {number: turn for number, turn in self.turns.items() if turn.caller.is_trained}
        if not turns:
            raise ValueError("the session has no answer of the policy that is trained")
        sizes = self._sizes(turn.place for turn in turns.values())
        sizes[self._prompt] = self._prompt.end
        continued: dict[_Place, _Run] = {}
        for run, size in sizes.items():
            if size:
                continued.setdefault((run.before, run.begin), run)
        written = {turn.run for turn in turns.values()}
        parts: list[Completion] = []
        branches: list[Branch] = []
        starts: dict[_Run, int] = {}
        at = 0
        for first in [run for run, size in sizes.items() if size]:
            if first in starts:
                continue
            before = first.before
            parent = -1 if before is None else starts[before] + first.begin - before.begin - 1
            branches.append((at, parent))
            following: _Run | None = first
            while following is not None:
                run = following
                starts[run] = at
                at += sizes[run]
                read = only_read(run.tokens.token_ids[: sizes[run]])
                parts.append(run.tokens if run in written else read)
                # The first run that continues a whole one is next to it in the row.
                following = continued.get((run, run.begin + sizes[run]))
        # The prompt is the first part, and not a part of the row.
        ends = {}
        for number, turn in turns.items():
            ends[number] = starts[turn.run] + sizes[turn.run] - sizes[self._prompt]
        return joined(parts[1:]), tuple(branches[1:]), ends
