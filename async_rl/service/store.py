"""The table of the service's requests, and what they have made: sessions, training runs, samplers
and checkpoints, in one SQLite file.

Invariants
- A change is committed when the call, or the block of `transaction`, returns: nothing is answered
  that a kill could undo.
- The row of a request of a training run stays: its number is known for ever, and the same number
  with another body is recognized. Its body and its answer are deleted when nobody needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from async_rl.buffer.store.connection import Values, connect, select
from async_rl.core.frozen import Value
from async_rl.sessions.errors import Refused

FILE = "requests.sqlite"
"""Its name in the service's directory."""
R = TypeVar("R", bound=Value)


class Session(Value):
    """A client's session. display_name and user_metadata (JSON) are the client's words; seen_s: of
    its newest request; ended: why it was finished, empty while it is not.
    """

    session_id: str
    created_s: float
    display_name: str | None
    user_metadata: str
    seen_s: float = 0.0
    ended: str = ""


class Run(Value):
    """A training run: an adapter that a session trains. model_id of the API.

    lora: its lora_config, as JSON.
    """

    run_id: str
    session_id: str
    lora: str
    user_metadata: str
    is_unloaded: bool = False


class Sampler(Value):
    """A sampling session. model_path: the checkpoint as the client named it.

    adapter: its directory; is_inflight: the newest such adapter of the run replaces it, also in
    requests that have started; both empty: the base model.  version: optimizer steps of `adapter`.
    """

    sampler_id: str
    session_id: str
    run_id: str = ""
    model_path: str | None = None
    adapter: str = ""
    is_inflight: bool = False
    version: int = 0


class Checkpoint(Value):
    """A saved state. name: empty = of a sampler without a name, in no list.

    is_gone: deleted, expired or replaced; its directory is removed when nothing needs it.
    """

    directory: str
    path: str
    run_id: str
    kind: str
    name: str
    version: int
    created_s: float
    size_bytes: int
    user_metadata: str
    expires_s: float | None = None
    is_gone: bool = False


class Request(Value):
    """A request whose answer is a future.

    owner: training run or sampler.  digest: of the body.  directory: of the checkpoint that it
    loaded.  answer, error: one of both is there when answered_s is, until it is forgotten.
    outcome: checksum of what the learner answered.
    """

    request_id: str
    owner: str
    seq_id: int
    kind: str
    digest: str
    body: bytes | None
    accepted_s: float
    directory: str = ""
    answer: bytes | None = None
    error: str = ""
    outcome: int = 0
    answered_s: float | None = None
    delivered_s: float | None = None


_TABLES = (Session, Run, Sampler, Checkpoint, Request)
_INDEXES = """
CREATE UNIQUE INDEX IF NOT EXISTS numbered ON requests (owner, seq_id);
CREATE INDEX IF NOT EXISTS answered ON requests (answered_s);
CREATE INDEX IF NOT EXISTS kept ON requests (owner, seq_id) WHERE body IS NOT NULL;
CREATE INDEX IF NOT EXISTS named ON checkpoints (path);
CREATE INDEX IF NOT EXISTS used ON samplers (adapter);
CREATE INDEX IF NOT EXISTS loaded ON requests (directory) WHERE directory != '';
"""


class Store:
    """The open file. Raises InfrastructureError if it cannot be opened."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._connection = connect(directory / FILE)
        self._connection.execute("PRAGMA journal_mode=WAL")
        for kind in _TABLES:
            fields = kind.__struct_fields__
            columns = ", ".join((f"{fields[0]} PRIMARY KEY", *fields[1:]))
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {_table(kind)} ({columns})")
        self._connection.executescript(_INDEXES)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of the block together, or none if it raises."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def add(self, row: Value) -> None:
        """Add a row."""
        values = msgspec.structs.asdict(row)
        places = ", ".join("?" * len(values))
        self.change(f"INSERT INTO {_table(type(row))} VALUES ({places})", *values.values())

    def change(self, statement: str, *values: Any) -> None:
        """Execute a statement of SQL."""
        self._connection.execute(statement, values)

    def all(self, kind: type[R], where: str, *values: Any) -> list[R]:
        """Return the rows for which a condition of SQL is true."""
        return select(self._connection, kind, f"SELECT * FROM {_table(kind)} WHERE {where}", values)

    def one(self, kind: type[R], where: str, *values: Any) -> R | None:
        """Return the first such row."""
        return next(iter(self.all(kind, f"{where} LIMIT 1", *values)), None)

    def known(self, kind: type[R], key: str) -> R:
        """Return the row of a key. Raises Refused if there is none."""
        found = self.one(kind, f"{kind.__struct_fields__[0]}=?", key)
        if found is None:
            raise Refused(f"no {kind.__name__.lower()} {key!r} is known here", status=404)
        return found

    def checkpoint(self, path: str, kind: str = "") -> Checkpoint:
        """Return the checkpoint of a path. Raises Refused if there is none, or it has another
        kind.
        """
        found = self.one(Checkpoint, "path=? AND name!='' AND NOT is_gone", path)
        if found is None:
            reason = "was never saved here, was deleted or has expired"
            raise Refused(f"the checkpoint {path!r} {reason}", status=404)
        if kind not in ("", found.kind):
            raise Refused(f"{path} has {found.kind}; this needs {kind}")
        return found

    def value(self, query: str, values: Values) -> Any:
        """Return what a query has as its only result, None if it has none."""
        found = self._connection.execute(query, values).fetchone()
        return found and found[0]


def _table(kind: type[Value]) -> str:
    return f"{kind.__name__.lower()}s"
