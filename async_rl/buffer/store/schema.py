"""The tables of a run's store, as SQL. People and `async-rl ledger` query them during the run.

Damage of the file is found by redundancy: rows that are written once have a checksum of their
values. Of every other table an index, NAME_copy, has all columns; SQLite's integrity_check compares
the two.

Each kind of change is a trigger of a temporary view, so that one statement executes all changes of
a transaction, in their order. The thread of the writer then waits for Python's lock once, and not
once per statement: while the event loop is busy, each of these waits takes up to 5 ms.

Times are Unix seconds. Step `version` turned policy version - 1 into `version`; `train_version` is
the version that a batch is trained on, so its step is one more. Versions of tokens are NULL while
they are unknown.
"""

import contextlib
import itertools
import re
import sqlite3
from collections.abc import Sequence

import msgspec

from async_rl.buffer.changes import Change, Completed
from async_rl.buffer.store.connection import Connection

SCHEMA_VERSION = 17

_TABLES = """
-- Facts about the whole run. forgotten_before: trajectories trained on older versions are deleted,
-- so the learner cannot go back there.
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

-- Every prompt that was ever issued.
CREATE TABLE prompts (
    prompt_id TEXT NOT NULL, purpose TEXT NOT NULL, data_source TEXT NOT NULL, text TEXT NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (purpose, prompt_id)
) WITHOUT ROWID;

-- Training prompts that left the data by their mean reward (data.filter), with the first position
-- that is issued without them.
CREATE TABLE left_prompts (
    prompt_id TEXT NOT NULL, prompt_index INTEGER PRIMARY KEY, position INTEGER NOT NULL,
    score REAL NOT NULL, left_s REAL NOT NULL
);

-- With a data.order that selects prompts: the row of prompts.sqlite at each position.
CREATE TABLE chosen_prompts (position INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL);

-- One row per group: its one state and its properties. Training groups end in trained or dropped,
-- evaluation groups in ready or dropped.
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY,
    purpose TEXT NOT NULL,              -- train, eval
    prompt_id TEXT NOT NULL,
    position INTEGER NOT NULL,          -- index in its purpose's order, counted over all epochs
    evaluation INTEGER,                 -- eval: the version it evaluates
    num_samples INTEGER NOT NULL,
    state TEXT NOT NULL,                -- issued, generating, ready, leased, trained, dropped
    attempt INTEGER NOT NULL,           -- hand-outs so far
    generator TEXT NOT NULL,            -- of the last attempt
    incarnation TEXT NOT NULL,
    version INTEGER NOT NULL,           -- no token of the last attempt is older; -1: none
    train_version INTEGER,              -- of its batch: leased, trained or planned
    oldest_version INTEGER,             -- of its trained tokens
    newest_version INTEGER,
    num_tokens INTEGER,
    num_trained_tokens INTEGER,
    reward_mean REAL,
    pass_rate REAL,                     -- share of samples that pass every test
    response_length_mean REAL,
    truncated_share REAL,
    generation_s REAL,
    times BLOB,                         -- float32, per sample: response tokens, and seconds from
                                        -- its start to first token, last token, score (recording)
    rewards TEXT,                       -- JSON list: the reward of each sample
    parts TEXT,                         -- JSON object: the mean of each part of the reward
    calls TEXT,                         -- JSON list: of each sample of an agent the list of its
                                        -- calls (core/calls.py: AgentCall)
    reason TEXT NOT NULL DEFAULT '',    -- why it was dropped, or why its last attempt failed
    message TEXT NOT NULL DEFAULT '',
    admitted_s REAL NOT NULL,
    changed_s REAL NOT NULL
);
CREATE INDEX groups_open ON groups (group_id) WHERE state IN ('issued', 'generating');
CREATE INDEX groups_ready ON groups (group_id) WHERE state='ready' AND purpose='train';
CREATE INDEX groups_leased ON groups (group_id) WHERE state='leased';
CREATE INDEX groups_by_batch ON groups (train_version) WHERE train_version IS NOT NULL;
CREATE INDEX groups_by_prompt ON groups (prompt_id);
CREATE INDEX groups_by_evaluation ON groups (evaluation) WHERE evaluation IS NOT NULL;

-- The trajectories, as heads.pack_group: the bytes that the generator sent.
CREATE TABLE blobs (
    group_id INTEGER PRIMARY KEY, payload BLOB NOT NULL, checksum INTEGER NOT NULL
);

-- Every change of state, in order.
CREATE TABLE transitions (
    group_id INTEGER NOT NULL,          -- first, so that the copy also finds the rows of a group
    transition_id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL, state TEXT NOT NULL, at_s REAL NOT NULL,
    generator TEXT NOT NULL, version INTEGER, reason TEXT NOT NULL
);

-- Learner steps. undone_s is set when the learner went back to an older checkpoint: then the step
-- is not part of the surviving history.
CREATE TABLE steps (
    step_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, committed_s REAL NOT NULL, undone_s REAL
);
CREATE UNIQUE INDEX steps_current ON steps (version) WHERE undone_s IS NULL;

-- The lives of the learner: each process that took over, and the version that it started from.
CREATE TABLE lives (
    life INTEGER PRIMARY KEY, incarnation TEXT NOT NULL UNIQUE, version INTEGER NOT NULL,
    started_s REAL NOT NULL
);

-- Which step trained which group, undone steps included.
CREATE TABLE trained (
    group_id INTEGER NOT NULL, step_id INTEGER NOT NULL, PRIMARY KEY (step_id, group_id)
) WITHOUT ROWID;

-- Which step trained which group of an earlier step once more (buffer.uses_per_group).
CREATE TABLE reused (
    group_id INTEGER NOT NULL, step_id INTEGER NOT NULL, PRIMARY KEY (step_id, group_id)
) WITHOUT ROWID;

-- The steps whose groups have no rows any more (store/store.py): sums over the groups of the
-- step, and over all such steps the number of groups per age in versions (kind `age`) and per
-- generator. Kinds `train dropped`, `eval ready` and `eval dropped` count other groups
-- that have no rows any more, by reason.
CREATE TABLE compacted (
    version INTEGER PRIMARY KEY, num_groups INTEGER NOT NULL, last_group_id INTEGER NOT NULL,
    last_position INTEGER NOT NULL, num_tokens INTEGER, num_trained_tokens INTEGER, reward_mean REAL
);
CREATE TABLE compacted_counts (
    kind TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;

-- The groups that have no rows any more, and all groups, per purpose, state and reason. Views,
-- because only people read them: they wait for a second, and the writer has no work for it.
CREATE VIEW compacted_groups AS
    SELECT 'train' AS purpose, 'trained' AS state, '' AS reason, sum(num_groups) AS number
        FROM compacted GROUP BY 1
    UNION ALL
    SELECT substr(kind, 1, instr(kind, ' ') - 1), substr(kind, instr(kind, ' ') + 1), name, number
        FROM compacted_counts WHERE kind NOT IN ('age', 'generator');
CREATE VIEW counts AS
    SELECT purpose, state, reason, sum(number) AS number FROM (
        SELECT purpose, state, reason, count(*) AS number FROM groups GROUP BY 1, 2, 3
        UNION ALL SELECT * FROM compacted_groups
    ) GROUP BY 1, 2, 3;

-- figures: the reported metrics as a JSON object, once it is finished.
CREATE TABLE evaluations (
    version INTEGER PRIMARY KEY, num_prompts INTEGER NOT NULL, started_s REAL NOT NULL,
    finished_s REAL, figures TEXT
);
"""

_CHECKED = ("prompts", "blobs")
"""Tables with a column `checksum`, of the other columns (core/checksums.py)."""


def create_schema() -> str:
    """Return the SQL of the tables and of their copies."""
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_TABLES)
        tables = empty.execute(
            "SELECT m.name, group_concat(c.name) FROM sqlite_schema m, pragma_table_info(m.name) c"
            " WHERE m.type='table' GROUP BY m.name"
        )
        copies = [
            f"CREATE INDEX {table}_copy ON {table} ({columns});"
            for table, columns in tables
            if table not in _CHECKED
        ]
    return _TABLES + "".join(copies)


def schema_of(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    """Return the tables, indexes and views of a store."""
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
    ).fetchall()


def expected_schema() -> list[tuple[str, ...]]:
    """Return `schema_of` a new store."""
    with contextlib.closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(create_schema())
        return schema_of(empty)


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
