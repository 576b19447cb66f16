"""The answers that agents were sent, and what the journal of sessions promises about them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_CLOSED = "SELECT group_id FROM groups WHERE state='dropped'"
Session = tuple[str, str]
"""Group and sample."""


@dataclass
class Written:
    """What an engine wrote for one call. before: the tokens of the call; keys: of the agents that
    were sent some of it; epoch: how often the supervisor had been lost.
    """

    session: Session
    attempt: int
    before: tuple[int, ...]
    epoch: int
    num_tokens: int = 0
    keys: set[str] = field(default_factory=set)


class Answers:
    """All calls of the policy by agents of one world."""

    def __init__(self) -> None:
        self.epoch = 0
        self._all: list[Written] = []
        self._again: list[tuple[Written, int]] = []
        self.ended: list[Written] = []
        """The last calls of programs whose next call was refused, as of an unknown session."""

    def begin(self, request_id: str, before: Sequence[int], limit: int) -> Written:
        """An engine starts to write the answer to a call."""
        group, attempt, sample = request_id.partition("/")[0].split(".")[-3:]
        call = Written((group, sample), int(attempt), tuple(before), self.epoch)
        for known in self._all:
            is_same = (known.session, known.before, known.epoch) == (
                call.session,
                call.before,
                call.epoch,
            )
            # One agent was sent it, whose gateway was lost; its successor repeats the call.
            is_lost = is_same and known.attempt < call.attempt and len(known.keys) == 1
            if is_lost and known.num_tokens <= limit:
                self._again.append((known, call.attempt))
        self._all.append(call)
        return call

    def problems(self, connection: sqlite3.Connection) -> Iterator[str]:
        """Yield the broken promises: after a lost gateway an agent gets the answers again that it
        was sent, and after a failed attempt none of them.
        """
        failed: dict[str, set[int]] = {}
        for group, attempt in connection.execute(
            "SELECT group_id, attempt FROM transitions WHERE state='issued' AND reason NOT IN ('',"
            " 'generator_lost')"
        ):
            failed.setdefault(str(group), set()).add(attempt)
        closed = {str(group) for (group,) in connection.execute(_CLOSED)}
        for call in self.ended:
            if call.session[0] not in failed.keys() | closed:
                yield f"a program lost its session {call.session}, and no attempt of it had failed"
        for known, attempt in self._again:
            if not failed.get(known.session[0], set()) & set(range(known.attempt, attempt)):
                yield (
                    f"attempt {attempt} of {known.session} drew an answer again that attempt"
                    f" {known.attempt} had been sent"
                )
        for call in self._all:
            if len(call.keys) > 1 and call.attempt in failed.get(call.session[0], set()):
                yield f"an answer of the failed attempt {call.attempt} of {call.session} was sent"
