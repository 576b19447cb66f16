"""Statements about faults that the run survived, by its events and its ledger."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from async_rl.buffer.store.connection import Connection
from async_rl.core.types import DropReason
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.statements import Statement, at, listed, statement

_RETURNED = (
    "SELECT reason, count(*), min(at_s), max(at_s) FROM transitions WHERE reason != '' AND state IN"
    " ('issued', 'dropped') GROUP BY reason ORDER BY 2 DESC"
)
_LIVES = "SELECT life, version, started_s FROM lives ORDER BY life"
_SHOWN = ("silent", "stalled", "alarm")


def faults(store: Connection, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about starts, restarts, returns of the learner, and failed attempts."""
    starts = [event for event in noted if event.kind == "start"]
    ends = {"finished", "stopped", "failed"}
    evidence = []
    if starts:
        evidence.append(f"{len(starts)} starts of the run, the first at {at(starts[0].at_s)}")
    # A start after a start without an end in between: the run was killed.
    ordered = [event for event in noted if event.kind == "start" or event.kind in ends]
    killed = [one for one, then in itertools.pairwise(ordered) if one.kind == then.kind == "start"]
    evidence += listed(f"the run of {at(event.at_s)} ended without a report" for event in killed)
    evidence += listed(
        f"{event.kind} at {at(event.at_s)}, step {event.step}"
        f"{f': {event.text}' if event.text else ''}"
        for event in ordered
        if event.kind in ends
    )
    restarts = [event for event in noted if event.kind == "restarts"]
    names = Counter(event.text.partition(" ")[0] for event in restarts)
    evidence.append(
        f"{len(restarts)} restarts: {', '.join(f'{n} {k}' for n, k in names.items()) or 'none'}"
    )
    evidence += listed(f"{at(event.at_s)}: {event.text}" for event in restarts)
    for kind in _SHOWN:
        texts = [event.text for event in noted if event.kind == kind]
        if texts:
            evidence.append(f"{kind}: {len(texts)} reports, the last: {texts[-1]}")
    yield statement(
        "faults",
        "each start, end and restart is recorded",
        unknown=[] if starts else ["the run has no events.jsonl"],
        evidence=evidence if starts else (),
    )
    yield _returns(store)
    yield _attempts(store)


def _returns(store: Connection) -> Statement:
    lives = store.execute(_LIVES).fetchall()
    query = "SELECT count(*) FROM steps WHERE undone_s IS NOT NULL"
    (num_undone,) = store.execute(query).fetchone()
    return statement(
        "faults",
        "each return of the learner to an earlier version is recorded",
        evidence=[
            f"{len(lives)} lives of the learner; {num_undone} steps were undone",
            *listed(
                f"life {life} started from version {version} at {at(started_s)}"
                for life, version, started_s in lives
            ),
        ],
    )


def _attempts(store: Connection) -> Statement:
    rows = store.execute(_RETURNED).fetchall()
    outages = [row for row in rows if row[0] == DropReason.SCORING_OUTAGE]
    evidence = [f"{number} attempts ended with {reason}" for reason, number, *_ in rows]
    evidence += [
        f"scoring was unavailable between {at(first)} and {at(last)}"
        for _, _, first, last in outages
    ]
    return statement(
        "faults",
        "each failed attempt is recorded with its reason",
        evidence=evidence or ["no attempt failed"],
    )
