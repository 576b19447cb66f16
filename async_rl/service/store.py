"""The table of the service's requests, and what they have made: sessions, training runs, samplers
and checkpoints, in one SQLite file.

Invariants
- A change is committed when the call, or the block of `transaction`, returns: nothing is answered
  that a kill could undo.
- A request is accepted once and answered once, and both are in the store before anybody sees them.
- The row of a request of a training run stays: its number is known for ever, and the same number
  with another body is recognized. Its body and its answer are deleted when nobody needs them.
"""

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from async_rl.buffer.store.connection import Values, connect, hold_lock, select
from async_rl.core.frozen import Value
from async_rl.protocol.service import CHANGING
from async_rl.service.address import STORE_FILE
from async_rl.sessions.errors import Refused

R = TypeVar("R", bound=Value)


class Session(Value):
    """A client's session. display_name and user_metadata (JSON) are the client's words; seen_s: of
    its newest request; ended: why it was finished, empty while it is not.
    """

    session_id: str
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
    created_s: float
    user_metadata: str
    version: int = 0
    size_bytes: int = 0
    expires_s: float | None = None
    is_gone: bool = False


class Request(Value):
    """A request whose answer is a future.

    owner: training run or sampler.  digest: of kind and body.  directory: of the checkpoint that it
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
_NEXT = (
    "SELECT coalesce(1 + max(seq_id), 0) FROM requests WHERE owner={} AND answered_s IS NOT NULL"
)
_READY = f"""
SELECT owner FROM requests AS waiting INDEXED BY ready WHERE answered_s IS NULL AND kind!='sample'
GROUP BY owner HAVING min(seq_id)=({_NEXT.format("waiting.owner")})
"""
_INDEXES = """
CREATE UNIQUE INDEX IF NOT EXISTS numbered ON requests (owner, seq_id);
CREATE INDEX IF NOT EXISTS answered ON requests (answered_s);
CREATE INDEX IF NOT EXISTS ready ON requests (owner, seq_id) WHERE answered_s IS NULL AND
    kind!='sample';
CREATE INDEX IF NOT EXISTS kept ON requests (owner, seq_id) WHERE body IS NOT NULL;
CREATE INDEX IF NOT EXISTS named ON checkpoints (path);
CREATE INDEX IF NOT EXISTS used ON samplers (adapter);
CREATE INDEX IF NOT EXISTS loaded ON requests (directory) WHERE directory != '';
"""


class Store:
    """The open file, and the clients that wait for answers in it. poll_s: for how long a client
    waits before it has to ask again. Raises Unavailable if another front has the file open,
    InfrastructureError if it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        *,
        now: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        poll_s: float = 30.0,
    ) -> None:
        self.directory = directory
        self.now = now
        self.new_id = new_id
        self._poll_s = poll_s
        self._events: dict[str, asyncio.Event] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = hold_lock(directory / STORE_FILE)
        self._connection = connect(directory / STORE_FILE)
        self._connection.execute("PRAGMA journal_mode=WAL")
        for kind in _TABLES:
            fields = kind.__struct_fields__
            columns = ", ".join((f"{fields[0]} PRIMARY KEY", *fields[1:]))
            self._connection.execute(f"CREATE TABLE IF NOT EXISTS {_table(kind)} ({columns})")
        self._connection.executescript(_INDEXES)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
        self._lock.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes of the block together, or none if it raises. Blocks may be nested."""
        if self._connection.in_transaction:
            yield
            return
        # The connection commits at the end of the block, or rolls back.
        with self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield

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

    def next_seq(self, owner: str) -> int:
        """Return the number of the next request to execute of a run."""
        return int(self.value(_NEXT.format("?"), [owner]))

    def ready(self) -> list[str]:
        """Return the runs whose next request is there."""
        return [owner for (owner,) in self._connection.execute(_READY)]

    def put(
        self, owner: str, seq_id: int, kind: str, body: bytes, *, new: Run | None = None
    ) -> tuple[Request, bool]:
        """Store a request, with its new run. Returns it, and whether it was there already. Raises
        Refused if its number has another body.
        """
        digest = hashlib.sha256(f"{kind} ".encode() + body).hexdigest()
        known = self.one(Request, "owner=? AND seq_id=?", owner, seq_id)
        if known is not None:
            if known.digest != digest:
                reason = f"number {seq_id} of {owner} is another request ({known.kind})"
                raise Refused(reason, status=409)
            return known, True
        request = Request(
            request_id=self.new_id(),
            owner=owner,
            seq_id=seq_id,
            kind=kind,
            digest=digest,
            body=body,
            accepted_s=self.now(),
        )
        with self.transaction():
            if new is not None:
                self.add(new)
            self.add(request)
        return request, False

    async def wait(self, request_id: str) -> Request | None:
        """Return a request with its answer, None if there is none in time. Raises Refused."""
        request = self.known(Request, request_id)
        if request.answered_s is None:
            event = self._events.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(self._poll_s):
                    await event.wait()
            except TimeoutError:
                return None
            request = self.known(Request, request_id)
        if request.answer is None and not request.error:
            raise Refused(f"the answer to {request_id} was delivered, and is deleted", status=410)
        if request.delivered_s is None:
            statement = "UPDATE requests SET delivered_s=? WHERE request_id=?"
            self.change(statement, self.now(), request_id)
        return request

    def finish(
        self,
        request: Request,
        answer: bytes | None = None,
        *,
        error: str = "",
        directory: str = "",
        outcome: int = 0,
    ) -> None:
        """Store the answer or the error of a request, and wake its client."""
        is_needed = request.kind in {*CHANGING, "sample"}
        self.change(
            "UPDATE requests SET answer=?, error=?, directory=?, outcome=?, answered_s=?, body=?"
            " WHERE request_id=?",
            answer,
            error,
            directory,
            outcome,
            self.now(),
            request.body if is_needed and not error else None,
            request.request_id,
        )
        event = self._events.pop(request.request_id, None)
        if event is not None:
            event.set()


def _table(kind: type[Value]) -> str:
    return f"{kind.__name__.lower()}s"
