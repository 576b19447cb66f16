"""Statements about faults that the run survived, by its events and its ledger."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from async_rl.buffer.store.connection import Connection
from async_rl.monitoring.events import Event
from async_rl.runs.certificate.origin import ORIGIN
from async_rl.runs.certificate.statements import Statement, at, listed, statement

# Attempts that failed, by reason, and the time between the first and the last failure.
_FAILED = (
    "SELECT reason, count(*), min(at_s), max(at_s) FROM transitions WHERE reason != '' AND state IN"
    " ('issued', 'dropped') GROUP BY reason ORDER BY 2 DESC"
)
_LIVES = "SELECT life, version, started_s FROM lives ORDER BY life"
_UNDONE = "SELECT count(*) FROM steps WHERE undone_s IS NOT NULL"
_BOUNDS = ("start", "finished", "stopped", "failed")


def faults(store: Connection, noted: Sequence[Event]) -> Iterator[Statement]:
    """Yield the statements about starts, ends, restarts, returns of the learner, and failures."""
    bounds = [event for event in noted if event.kind in _BOUNDS]
    starts = [f"start at {at(event.at_s)}" for event in bounds if event.kind == "start"]
    # A start that follows a start: nothing reported the end of the run in between.
    killed = [
        f"the run that started at {at(one.at_s)} was killed"
        for one, then in itertools.pairwise(bounds)
        if one.kind == then.kind == "start"
    ]
    shown = [event for event in noted if event.kind not in ("start", ORIGIN)]
    yield statement(
        "faults",
        "each start, end, restart, silence and stall is recorded",
        unknown=[] if starts else ["no start is on record"],
        evidence=[
            f"{len(starts)} starts, {len(killed)} of them killed; {len(shown)} other events",
            *listed(killed),
            *listed(f"{at(event.at_s)} {event.kind} {event.text}" for event in shown),
        ],
    )
    lives = store.execute(_LIVES).fetchall()
    yield statement(
        "faults",
        "each return of the learner and each failed attempt is recorded",
        evidence=[
            f"{len(lives)} lives of the learner; {store.execute(_UNDONE).fetchone()[0]} steps were"
            " undone",
            *listed(f"life {n} began with version {v} at {at(s)}" for n, v, s in lives),
            *(
                f"{number} attempts or groups failed ({reason}), between {at(first)} and {at(last)}"
                for reason, number, first, last in store.execute(_FAILED)
            ),
        ],
    )
