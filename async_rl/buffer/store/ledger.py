"""Queries of a run's store, for people: the history of a prompt, of a step or of a group, and the
number of groups in each state.

Invariants: reads only, also while the run writes; one answer comes from one moment. Tables in
schema.py, the audit of the whole history in audit.py.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.buffer.store.schema import SCHEMA_VERSION
from async_rl.buffer.store.writer import connect
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.types import GroupState

# A group that a step trained becomes ready again when the step is undone, so the state alone says
# that the step survives.
STEP = "CASE state WHEN 'trained' THEN train_version + 1 END"
GROUP_COLUMNS = (
    f"group_id, purpose, groups.prompt_id, position, state, {STEP} AS step, attempt, generator,"
    " num_samples, reward_mean, pass_rate, truncated_share, response_length_mean, num_tokens,"
    " num_trained_tokens, oldest_version, newest_version, train_version, rewards, parts, reason,"
    " message, admitted_s, changed_s, EXISTS(SELECT 1 FROM blobs WHERE"
    " blobs.group_id=groups.group_id) AS is_stored"
)
_HISTORY = (
    "SELECT at_s, state, attempt, generator, version, reason FROM transitions WHERE group_id=?"
    " ORDER BY transition_id"
)


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One change of state. version: by state, the version of the generator, the oldest token,
    the batch or the step.
    """

    at_s: float
    state: str
    attempt: int
    generator: str
    version: int | None
    reason: str


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as GROUP_COLUMNS. step: the step of the surviving history that trained it; times
    are Unix seconds; is_stored: whether its trajectories are.
    """

    group_id: int
    purpose: str
    prompt_id: str
    position: int
    state: str
    step: int | None
    attempt: int
    generator: str
    num_samples: int
    reward_mean: float | None
    pass_rate: float | None
    truncated_share: float | None
    response_length_mean: float | None
    num_tokens: int | None
    num_trained_tokens: int | None
    oldest_version: int | None
    newest_version: int | None
    train_version: int | None
    rewards: list[float]
    parts: dict[str, float]
    reason: str
    message: str
    admitted_s: float
    changed_s: float
    is_stored: bool

    @property
    def age(self) -> int | None:
        """Versions between its oldest token and the weights that its batch was trained on."""
        if self.train_version is None or self.oldest_version is None:
            return None
        return self.train_version - self.oldest_version


class LedgerGroup(GroupRow, frozen=True, kw_only=True):
    """One group with its changes of state, oldest first."""

    history: list[Transition]


def fields_of(values: Sequence[object]) -> dict[str, Any]:
    """Return the fields of a GroupRow from a row with GROUP_COLUMNS."""
    fields: dict[str, Any] = dict(zip(GroupRow.__struct_fields__, values, strict=True))
    # NULL until the group is complete.
    fields["rewards"] = msgspec.json.decode(fields["rewards"] or "[]")
    fields["parts"] = msgspec.json.decode(fields["parts"] or "{}")
    fields["is_stored"] = bool(fields["is_stored"])
    return fields


class LeftPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that left the training data: its mean reward, and the first position that was issued
    without it.
    """

    prompt_id: str
    position: int
    score: float
    left_s: float


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The run in counts. dropped: training groups by reason; staleness: trained groups by age in
    versions; num_compacted: groups that have no rows any more (config/running.py: KEPT_GROUPS).
    """

    learner_version: int
    num_undone_steps: int
    num_prompts: int
    next_position: int
    num_left: int
    states: dict[str, int]
    dropped: dict[str, int]
    evaluation_states: dict[str, int]
    staleness: dict[int, int]
    generators: dict[str, int]
    num_stored: int
    stored_bytes: int
    num_compacted: int


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open one moment of the store, read-only. Raises Unavailable if it does not exist,
    InfrastructureError if it cannot be read.
    """
    if not path.is_file():
        raise Unavailable(f"{path} does not exist: the run has stored nothing yet")
    with contextlib.closing(connect(path)) as connection:
        try:
            # Not opened read-only: a reader of a WAL file may have to create its -shm file.
            connection.execute("PRAGMA query_only=1")
            # All queries of a page see one moment while the run writes.
            connection.execute("BEGIN")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION:
                raise InfrastructureError(
                    f"{path} has store schema {version}, this version of async-rl reads"
                    f" {SCHEMA_VERSION}; use the version that made it"
                )
            yield connection
        except sqlite3.Error as error:
            raise InfrastructureError(f"{path} cannot be read: {error}") from error


def compacted_counts(connection: sqlite3.Connection) -> dict[tuple[str, str, str], int]:
    """Return the number of groups that have no rows any more, by purpose, state and reason."""
    (num_trained,) = connection.execute("SELECT sum(num_groups) FROM compacted").fetchone()
    counts = {("train", "trained", ""): num_trained} if num_trained else {}
    rows = connection.execute(
        "SELECT kind, name, number FROM compacted_counts WHERE kind NOT IN ('age', 'generator')"
    )
    for kind, reason, number in rows:
        purpose, state = kind.split()
        counts[purpose, state, reason] = number
    return counts


class Ledger:
    """The queries of one moment of the store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def learner_version(self) -> int:
        """Steps of the surviving history."""
        return self._one("SELECT coalesce(max(version), 0) FROM steps WHERE undone_s IS NULL")

    def of_prompt(self, prompt_id: str) -> list[LedgerGroup]:
        """Every group of the prompt, oldest first."""
        return self._groups("prompt_id=?", prompt_id)

    def left(self) -> tuple[LeftPrompt, ...]:
        """The prompts that left the training data, oldest first."""
        names = LeftPrompt.__struct_fields__
        query = f"SELECT {', '.join(names)} FROM left_prompts ORDER BY position, prompt_id"
        return tuple(LeftPrompt(**row) for row in self._rows(names, query))

    def of_step(self, step: int) -> list[LedgerGroup]:
        """The groups that the surviving step trained."""
        return self._groups("state='trained' AND train_version=?", step - 1)

    def of_group(self, group_id: int) -> LedgerGroup | None:
        """The group with this id, or None."""
        return next(iter(self._groups("group_id=?", group_id)), None)

    def of_state(self, state: GroupState) -> list[LedgerGroup]:
        """Every group in this state."""
        return self._groups("state=?", state.value)

    def summary(self) -> LedgerSummary:
        """The run in counts."""
        return LedgerSummary(
            learner_version=self.learner_version,
            num_undone_steps=self._one("SELECT count(*) FROM steps WHERE undone_s IS NOT NULL"),
            num_prompts=self._one("SELECT count(*) FROM prompts WHERE purpose='train'"),
            next_position=self._one(
                "SELECT max(coalesce((SELECT max(position) FROM groups WHERE purpose='train'), -1),"
                " coalesce((SELECT max(last_position) FROM compacted), -1)) + 1"
            ),
            num_left=self._one("SELECT count(*) FROM left_prompts"),
            states={s.value: 0 for s in GroupState}
            | self._counts(
                "SELECT state, sum(number) FROM counts WHERE purpose='train' AND number>0 GROUP"
                " BY 1"
            ),
            dropped=self._counts(
                "SELECT reason, number FROM counts WHERE purpose='train' AND state='dropped' AND"
                " number>0 ORDER BY 1"
            ),
            evaluation_states=self._counts(
                "SELECT state, sum(number) FROM counts WHERE purpose='eval' AND number>0 GROUP BY 1"
                " ORDER BY 1"
            ),
            staleness=self._trained(
                "max(train_version - oldest_version, 0)", "age", "CAST(name AS INTEGER)"
            ),
            generators=self._trained("generator", "generator", "name"),
            num_stored=self._one("SELECT count(*) FROM blobs"),
            stored_bytes=self._one("SELECT coalesce(sum(length(payload)), 0) FROM blobs"),
            num_compacted=sum(compacted_counts(self._connection).values()),
        )

    def _trained(self, column: str, kind: str, name: str) -> dict[Any, int]:
        """Trained groups by this column, with the compacted ones, which are counted by `kind`."""
        return self._counts(
            f"SELECT name, sum(number) FROM (SELECT {column} AS name, count(*) AS number FROM"
            f" groups WHERE state='trained' GROUP BY 1 UNION ALL SELECT {name}, number FROM"
            f" compacted_counts WHERE kind='{kind}') GROUP BY 1 ORDER BY 1"
        )

    def _groups(self, where: str, value: str | int) -> list[LedgerGroup]:
        query = f"SELECT {GROUP_COLUMNS} FROM groups WHERE {where} ORDER BY group_id"
        groups = []
        for values in self._connection.execute(query, (value,)).fetchall():
            fields = fields_of(values)
            history = self._rows(Transition.__struct_fields__, _HISTORY, fields["group_id"])
            groups.append(LedgerGroup(**fields, history=[Transition(**row) for row in history]))
        return groups

    def _rows(self, names: Sequence[str], query: str, *values: str | int) -> list[dict[str, Any]]:
        rows = self._connection.execute(query, values)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _one(self, query: str) -> int:
        return int(self._connection.execute(query).fetchone()[0])

    def _counts(self, query: str) -> dict[Any, int]:
        return dict(self._connection.execute(query).fetchall())
