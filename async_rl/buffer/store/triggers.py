"""Executes changes of the buffer's state: each kind of change is a trigger of a temporary view, so
that one statement executes all changes of a transaction, in their order.

The thread of the writer then waits for Python's lock once, and not once per statement: while the
event loop is busy, each of these waits takes up to 5 ms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import msgspec

from async_rl.buffer.changes import Change, Completed
from async_rl.buffer.store.connection import Connection

Row = tuple[Change, float]
"""A change and its Unix time."""
_VIEW = "CREATE TEMP VIEW changes AS SELECT '' AS kind, 0.0 AS now_s, '' AS fields, x'' AS times"
_TRIGGER = (
    "CREATE TEMP TRIGGER {kind} INSTEAD OF INSERT ON changes WHEN NEW.kind='{kind}' BEGIN {sql};"
    " END"
)
# Rollback, not abort: otherwise SQLite first copies every page that it changes to a journal. A
# statement that fails ends the store in any case.
_CHANGE = (
    "INSERT OR ROLLBACK INTO changes SELECT value->>0, value->>1, value->2,"
    " nullif(substr(:times, value->>3, value->>4), x'') FROM json_each(:rows)"
)
_PAYLOADS = (
    "INSERT INTO blobs SELECT value->>0, substr(:payloads, value->>1, value->>2), value->>3 FROM"
    " json_each(:rows)"
)


# The escape of NUL in JSON, after an even number of backslashes.
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def create_triggers(connection: Connection) -> None:
    """Create the view and its triggers, of this connection only."""
    connection.execute("PRAGMA temp_store=memory")
    connection.execute(_VIEW)
    for change in Change.__subclasses__():
        sql = "; ".join(change.statements)
        sql = sql.replace(":now_s", "NEW.now_s").replace(":times", "NEW.times")
        sql = re.sub(r":([a-z_.]+)", r"(NEW.fields->>'$.\1')", sql)
        connection.execute(_TRIGGER.format(kind=change.__name__, sql=sql))


def apply(connection: Connection, rows: Sequence[Row]) -> None:
    """Execute changes in their order."""
    if not rows:
        return
    stored = [change for change, _ in rows if isinstance(change, Completed)]
    payloads, spans = _joined([change.payload for change in stored])
    pairs = zip(stored, spans, strict=True)
    places = [(change.facts.group_id, *span, change.checksum) for change, span in pairs]
    _execute(connection, _PAYLOADS, places, payloads=payloads)
    times, spans = _joined([c.times if isinstance(c, Completed) else b"" for c, _ in rows])
    changed = [
        (type(change).__name__, now_s, change.row, *span)
        for (change, now_s), span in zip(rows, spans, strict=True)
    ]
    _execute(connection, _CHANGE, changed, times=times)


def _execute(connection: Connection, sql: str, rows: Sequence[object], **data: bytes) -> None:
    # SQLite ends a text of JSON at a NUL, and would lose the rest (`changes.storable`).
    text = msgspec.json.encode(rows).decode()
    if r"\u0000" in text:  # the expression alone takes longer than SQLite
        text = _NUL.sub(r"\1\\ufffd", text)
    connection.execute(sql, {"rows": text, **data})


def _joined(parts: Sequence[bytes | memoryview]) -> tuple[bytes, list[tuple[int, int]]]:
    """Join the parts; return also where each begins, counted from 1 as in SQL, and its length."""
    ends = itertools.accumulate(map(len, parts))
    spans = [(end - len(part) + 1, len(part)) for part, end in zip(parts, ends, strict=True)]
    return b"".join(parts), spans
