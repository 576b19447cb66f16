"""What must be true of a finished run: its store, its metrics and the answers to agents."""

from __future__ import annotations

import json
import operator
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LONGEST_STEP_S = 400.0
"""Virtual seconds to a step after the last fault: a lease, a silence and a restart follow each
other at most.
"""
_GIVEN_UP = "('generation_failed', 'generator_lost', 'scoring_failed', 'agent_failed')"
_PROMISES = (
    (
        "training group {} is still {} although the run has finished",
        "SELECT group_id, state FROM groups WHERE purpose='train' AND state NOT IN ('trained',"
        " 'dropped')",
    ),
    (
        "group {} was given up after {} of :attempts attempts: {}",
        "SELECT group_id, attempt, reason FROM groups WHERE state='dropped' AND attempt < :attempts"
        f" AND reason IN {_GIVEN_UP}",
    ),
    (
        "prompt {} has {} results in the evaluation of version {}",
        "SELECT position, count(*), evaluation FROM groups WHERE evaluation IS NOT NULL AND"
        " state='ready' GROUP BY evaluation, position HAVING count(*) > 1",
    ),
    (
        "the evaluation of version {} has {} of {} prompts",
        "SELECT evaluations.version, count(group_id) AS known, num_prompts FROM evaluations LEFT"
        " JOIN groups ON evaluation=evaluations.version WHERE figures IS NOT NULL GROUP BY 1 HAVING"
        " known != num_prompts",
    ),
)
"""A sentence, and the query of the rows that break it."""
_AS_NEW_AS_ITS_TICKET = (
    "group {} has a token of version {}, its ticket was for version {} or later",
    "SELECT group_id, oldest_version, version FROM groups WHERE state IN ('ready', 'leased',"
    " 'trained') AND oldest_version < version",
)
"""Not with agents: the answers of a journal may be older, and so may a generator that joins."""


def broken(connection: sqlite3.Connection, world: Any) -> Iterator[str]:
    """Yield the broken promises."""
    settings = {"attempts": world.config.generation.max_attempts}
    promises = _PROMISES if world.history.tokens else (*_PROMISES, _AS_NEW_AS_ITS_TICKET)
    for sentence, query in promises:
        for row in connection.execute(query, settings if ":attempts" in query else {}):
            yield sentence.replace(":attempts", str(settings["attempts"])).format(*row)
    yield from _oldest_first(connection)
    yield from _figures(connection, world)
    yield from _progress(connection, world)


def _oldest_first(connection: sqlite3.Connection) -> Iterator[str]:
    """A training group that waits for its next attempt is handed out before younger ones."""
    waiting: set[int] = set()
    for group_id, state in connection.execute(
        "SELECT group_id, transitions.state FROM transitions JOIN groups USING (group_id) WHERE"
        " purpose='train' ORDER BY transition_id"
    ):
        if state == "generating" and min(waiting, default=group_id) < group_id:
            yield f"group {group_id} was handed out before group {min(waiting)}, which waited"
        if state == "issued":
            waiting.add(group_id)
        else:
            waiting.discard(group_id)


def _figures(connection: sqlite3.Connection, world: Any) -> Iterator[str]:
    """The rows of metrics have the figures of the evaluations of their own steps."""
    stored = dict(connection.execute("SELECT version, figures FROM evaluations"))
    for row in map(json.loads, world.rows):
        figures = {name: value for name, value in row.items() if name.startswith("eval/")}
        known = stored.get(row["step"])
        # A buffer that ends with the run may report its last figures and not store them.
        is_last = row["step"] == world.config.num_steps and row["step"] in stored
        if figures and not (known is None and is_last):
            expected = json.loads(known or "{}")
            differs = {n: (v, expected.get(n)) for n, v in figures.items() if v != expected.get(n)}
            if differs:
                yield f"the row of step {row['step']} and the store differ: {differs}"


def _progress(connection: sqlite3.Connection, world: Any) -> Iterator[str]:
    """After the last fault no step takes long."""
    end_s = world.last_fault_s
    times = [
        at_s - 1.7e9
        for (at_s,) in connection.execute("SELECT committed_s FROM steps ORDER BY step_id")
    ]
    # The wall clock of the buffer was set, or the disk was full until a person made room.
    if world.kinds_of_faults & {"jump", "full_disk"}:
        return
    for before_s, at_s in zip([end_s, *times], times, strict=False):
        if at_s - max(before_s, end_s) > LONGEST_STEP_S:
            yield f"a step took {at_s - max(before_s, end_s):.0f} s although no fault was left"


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
        of_call = operator.attrgetter("session", "before", "epoch")
        for known in self._all:
            is_same = of_call(known) == of_call(call)
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
