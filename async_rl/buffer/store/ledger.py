"""Queries of a store, for people: the history of a prompt, of a step or of a group, the groups of
each state, and the audit of the whole history.

Reads only, also while the run writes; one answer comes from one moment, which `reading` opens. The
queries of the summary are in ledger.toml, the audit's in audit.toml, tables in schema.py.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from async_rl.buffer.store.connection import DAMAGE, STORE_FILE, Connection, Values, connect, select
from async_rl.buffer.store.reader import LEARNER_VERSION, NEXT_INDEX
from async_rl.buffer.store.schema import SCHEMA_VERSION, expected_schema, schema_of
from async_rl.config.run import BufferConfig
from async_rl.core.calls import AgentCall
from async_rl.core.errors import InfrastructureError, Unavailable
from async_rl.core.frozen import Value
from async_rl.core.records import read_packaged

OF_GROUP = "WHERE group_id=?"
OF_PROMPT = "WHERE prompt_id=?"
OF_STATE = "WHERE state=?"
# A group that a step trained becomes ready again when the step is undone, so the state alone says
# that the step survives.
OF_STEP = "WHERE state='trained' AND train_version=? - 1"
STEP = "CASE state WHEN 'trained' THEN train_version + 1 END"
# The JSON is NULL until the group is complete.
_GROUPS = (
    f"SELECT group_id, purpose, groups.prompt_id, position, state, {STEP} AS step, attempt,"
    " generator, num_samples, reward_mean, pass_rate, truncated_share, response_length_mean,"
    " num_tokens, num_trained_tokens, oldest_version, newest_version, train_version,"
    " coalesce(rewards, '[]') AS 'rewards [stored_json]', coalesce(parts, '{}') AS"
    " 'parts [stored_json]', coalesce(calls, '[]') AS 'calls [stored_json]', reason, message,"
    " admitted_s, changed_s, EXISTS(SELECT 1 FROM blobs WHERE blobs.group_id=groups.group_id)"
    " AS is_stored FROM groups"
)
_HISTORY = (
    "SELECT at_s, state, attempt, generator, version, reason FROM transitions WHERE group_id=?"
    " ORDER BY transition_id"
)
_SUMMARY = {
    "learner_version": LEARNER_VERSION,
    "next_position": NEXT_INDEX,
    **read_packaged(__package__, "ledger.toml", dict[str, str]),
}
# The sentences by kind, with their queries.
_CHECKS = read_packaged(__package__, "audit.toml", dict[str, dict[str, str]])
# One cause usually breaks a promise for thousands of groups.
_MAX_REPORTED = 20


class Transition(Value):
    """One change of state. version: by state, the version of the generator, the oldest token,
    the batch or the step.
    """

    at_s: float
    state: str
    attempt: int
    generator: str
    version: int | None
    reason: str


class GroupRow(Value):
    """One group. step: the step of the surviving history that trained it; times
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
    calls: list[list[AgentCall]]
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


class LedgerGroup(GroupRow):
    """One group with its changes of state, oldest first."""

    history: list[Transition]


class LedgerSummary(Value):
    """The run in counts. dropped: training groups by reason; staleness: trained groups by age in
    versions; num_compacted: groups that have no rows any more (config/run.py: KEPT_GROUPS).
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
def reading(run_dir: Path) -> Iterator[Connection]:
    """Open one moment of a run's store, read-only. Raises Unavailable if it does not exist,
    InfrastructureError if it cannot be read.
    """
    path = run_dir / STORE_FILE
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
        except DAMAGE as error:
            raise InfrastructureError(f"{path} cannot be read: {error}") from error


def group_rows(store: Connection, tail: str, values: Values) -> list[GroupRow]:
    """Return the groups that the rest of a query selects."""
    return select(store, GroupRow, f"{_GROUPS} {tail}", values)


def histories(store: Connection, which: str, value: str | int) -> list[LedgerGroup]:
    """Return groups, oldest first, with their changes of state. which: OF_GROUP, OF_PROMPT,
    OF_STATE or OF_STEP, for this value.
    """
    return [
        LedgerGroup(
            **msgspec.structs.asdict(row),
            history=select(store, Transition, _HISTORY, [row.group_id]),
        )
        for row in group_rows(store, f"{which} ORDER BY group_id", [value])
    ]


def summary(store: Connection) -> LedgerSummary:
    """Return the run in counts."""
    values = ", ".join(f"({query}) AS '{name}'" for name, query in _SUMMARY.items())
    # Counted once, although three values use it: a long run has a million rows.
    totals = "WITH totals AS MATERIALIZED (SELECT * FROM counts)"
    return select(store, LedgerSummary, f"{totals} SELECT {values}")[0]


class Audit(Value):
    """The number of checked rows, and the broken promises as sentences, at most 20. unchecked: what
    could not be checked, as sentences.
    """

    num_groups: int
    num_transitions: int
    num_steps: int
    num_undone_steps: int
    problems: list[str]
    unchecked: list[str]


def audit(connection: Connection, buffer: BufferConfig) -> Audit:
    """Check the promises about states and staleness by reading everything once, of `reading`.

    Every group is in one state and reached it by allowed changes; no prompt was left out or issued
    twice; admission kept its bound; nothing over age was leased or trained; in the surviving
    history steps follow each other without a gap, each trained exactly its groups, and each group
    was trained once; what may still be trained is stored. The history of compacted groups is
    deleted: only their counts are checked, and the audit reports it.
    """

    def selected(kind: str) -> Iterator[str]:
        settings = buffer.model_dump()
        for sentence, query in _CHECKS[kind].items():
            for row in connection.execute(_CHECKS["common"]["tables"] + query, settings):
                yield sentence.format(*row)

    def count(query: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

    problems = []
    if schema_of(connection) != expected_schema():
        problems.append(f"the tables, indexes or views are not those of schema {SCHEMA_VERSION}")
    problems += selected("damaged")
    # A damaged file would be reported as a breach of promises.
    if not problems:
        problems = list(selected("broken"))
    num_more = len(problems) - _MAX_REPORTED
    if num_more > 0:
        problems[_MAX_REPORTED:] = [f"and {num_more} more"]
    return Audit(
        num_groups=count("groups"),
        num_transitions=count("transitions"),
        num_steps=count("steps WHERE undone_s IS NULL"),
        num_undone_steps=count("steps WHERE undone_s IS NOT NULL"),
        problems=problems,
        unchecked=list(selected("unchecked")),
    )
