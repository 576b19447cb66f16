"""What must be true of the store and of the metrics of a run that has finished."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
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
