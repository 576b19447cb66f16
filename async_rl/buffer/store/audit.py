"""Checks of the promises about states and staleness over the whole history of a store.

The promises: every group is in one state and reached it by allowed changes; no prompt was left out
or issued twice; admission kept its bound; nothing over age was leased or trained; in the surviving
history steps follow each other without a gap, each trained exactly its groups, and each group was
trained once; what may still be trained is stored. Tables in schema.py.

The history of compacted groups is deleted. Only their counts are checked, and the audit reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from async_rl.buffer.store.connection import Connection
from async_rl.buffer.store.schema import SCHEMA_VERSION, expected_schema, schema_of

_NEXT = {
    "": ("issued", "generating"),
    # issued to ready: the generator was lost, and its result still arrived
    "issued": ("generating", "ready", "dropped"),
    "generating": ("issued", "ready", "dropped"),
    "ready": ("leased", "dropped"),
    "leased": ("trained", "ready", "dropped"),
    "trained": ("ready",),  # only a learner that went back returns a trained group
    "dropped": (),
}
_ACTIVE = ("issued", "generating", "ready", "leased")
_TRAINED = "FROM trained JOIN steps USING (step_id) WHERE undone_s IS NULL"


def _issued(name: str, number: str, last: str, last_compacted: str, purpose: str = "%") -> str:
    """The query that compares the number of stored rows with the number that was issued."""
    return (
        f"SELECT stored, '{name}', issued FROM (SELECT {number} + (SELECT coalesce(sum(number), 0)"
        f" FROM compacted_groups WHERE purpose LIKE '{purpose}') AS stored,"
        f" max(coalesce(max({last}), -1), (SELECT coalesce(max({last_compacted}), -1) FROM"
        f" compacted)) + 1 AS issued FROM groups WHERE purpose LIKE '{purpose}') WHERE stored !="
        " issued"
    )


_ISSUED = "{} {} are stored, {} were issued"
# Pairs of a sentence and the query of the rows that break its promise, with their values.
_DAMAGED = (
    # Not quick_check, which compares no table with its copy (schema.py).
    (
        "the file is damaged: {}",
        "SELECT integrity_check FROM pragma_integrity_check WHERE integrity_check!='ok'",
    ),
    (
        "the stored trajectories of group {} are damaged",
        "SELECT group_id FROM blobs WHERE checksum(payload, group_id) IS NOT checksum",
    ),
    (
        "the stored advantages of sample {} of group {} are damaged",
        "SELECT sample, group_id FROM advantages WHERE checksum(payload, group_id, sample) IS NOT"
        " checksum",
    ),
    (
        "the stored prompt {} is damaged",
        "SELECT prompt_id FROM prompts WHERE checksum(prompt_id, purpose, data_source, text) IS NOT"
        " checksum",
    ),
)
_BROKEN = (
    # Group ids and the positions of training prompts have no gap.
    (_ISSUED, _issued("group ids", "count(*)", "group_id", "last_group_id")),
    (
        _ISSUED,
        _issued(
            "positions in the order of prompts",
            "count(DISTINCT position)",
            "position",
            "last_position",
            "train",
        ),
    ),
    (_ISSUED, _issued("training groups", "count(*)", "position", "last_position", "train")),
    # In the history that survives, each step trained its groups, each trained group has one step.
    (
        "step {} trained {} groups instead of {}",
        "SELECT version, coalesce(num_groups, number, 0) AS size, :groups_per_step FROM steps LEFT"
        f" JOIN (SELECT version, count(*) AS number {_TRAINED} GROUP BY 1) USING (version) LEFT"
        " JOIN compacted USING (version) WHERE undone_s IS NULL AND size != :groups_per_step",
    ),
    (
        "group {} was trained {} times",
        f"SELECT group_id, count(*) {_TRAINED} GROUP BY 1 HAVING count(*) > 1",
    ),
    (
        "group {} is {}, but {} surviving step trained it",
        "SELECT group_id, state, iif(state='trained', 'no', 'a') FROM groups WHERE"
        f" (state='trained') != (group_id IN (SELECT group_id {_TRAINED}))",
    ),
    (
        "group {} was leased for version {} and trained by step {}",
        "SELECT group_id, train_version, steps.version FROM groups JOIN trained USING (group_id)"
        " JOIN steps USING (step_id) WHERE undone_s IS NULL AND steps.version != train_version + 1",
    ),
    # No batch of any history contained a group that was over age. Where over-age tokens are masked,
    # one young token makes a group trainable.
    (
        "group {} with tokens of version {} was leased for version {}",
        "SELECT group_id, decisive, leased FROM (SELECT group_id, t.version AS leased,"
        " iif(:age_rule='mask', newest_version, oldest_version) AS decisive FROM transitions t JOIN"
        " groups USING (group_id) WHERE t.state='leased') WHERE decisive IS NULL OR leased -"
        " decisive > :max_staleness_versions",
    ),
    (
        "group {} was dropped without a reason",
        "SELECT group_id FROM groups WHERE state='dropped' AND reason=''",
    ),
    # Groups that may still be trained have their trajectories; dropped ones have none, because
    # theirs would fill the disk of a long run.
    (
        "the trajectories of group {} are lost",
        "SELECT group_id FROM groups WHERE purpose='train' AND (state IN ('ready', 'leased') OR"
        " state='trained' AND train_version>=(SELECT coalesce(max(value), 0) FROM meta WHERE"
        " key='forgotten_before')) AND group_id NOT IN (SELECT group_id FROM blobs)",
    ),
    (
        "group {} is not complete, yet trajectories of it are stored",
        "SELECT group_id FROM blobs WHERE group_id NOT IN (SELECT group_id FROM groups WHERE state"
        " IN ('ready', 'leased', 'trained'))",
    ),
)
_OTHER_TABLES = f"the tables, indexes or views are not those of schema {SCHEMA_VERSION}"
_UNCHECKED = (
    (
        "the rows of {} groups of steps 1 to {} are compacted: their changes of state, their age,"
        " the bound of admission at that time and whether one was trained twice",
        "SELECT number, (SELECT max(version) FROM compacted) FROM (SELECT sum(number) AS number"
        " FROM compacted_groups) WHERE number > 0",
    ),
)
# One cause usually breaks a promise for thousands of groups.
_MAX_REPORTED = 20


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the run on which the promises depend."""

    groups_per_step: int
    max_staleness_versions: int
    age_rule: Literal["drop", "mask", "exact"]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """The number of checked rows, and the broken promises as sentences, at most 20. unchecked: what
    could not be checked, as sentences.
    """

    num_groups: int
    num_transitions: int
    num_steps: int
    num_undone_steps: int
    problems: list[str]
    unchecked: list[str] = []


def audit(connection: Connection, promise: Promise) -> Audit:
    """Read everything once. The connection must show one moment (`ledger.reading`)."""

    def selected(checks: tuple[tuple[str, str], ...]) -> Iterator[str]:
        settings = msgspec.structs.asdict(promise)
        for sentence, query in checks:
            for row in connection.execute(query, settings):
                yield sentence.format(*row)

    def count(query: str) -> int:
        return int(connection.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

    problems = [] if schema_of(connection) == expected_schema() else [_OTHER_TABLES]
    problems += selected(_DAMAGED)
    # A damaged file would be reported as a breach of promises.
    if not problems:
        problems = [*_histories(connection, promise), *_gaps(connection), *selected(_BROKEN)]
    num_more = len(problems) - _MAX_REPORTED
    if num_more > 0:
        problems[_MAX_REPORTED:] = [f"and {num_more} more"]
    return Audit(
        num_groups=count("groups"),
        num_transitions=count("transitions"),
        num_steps=count("steps WHERE undone_s IS NULL"),
        num_undone_steps=count("steps WHERE undone_s IS NOT NULL"),
        problems=problems,
        unchecked=list(selected(_UNCHECKED)),
    )


def _histories(connection: Connection, promise: Promise) -> Iterator[str]:
    """Every change was allowed, admission kept its bound, and each history agrees with the
    state of its group.
    """
    limit = (promise.max_staleness_versions + 1) * promise.groups_per_step
    states: dict[int, str] = {}
    attempts: dict[int, int] = {}
    num_active = 0
    # One pass in the order of the changes: the bound of admission is about each moment.
    rows = connection.execute(
        "SELECT group_id, t.state, t.attempt, purpose='train' FROM transitions t LEFT JOIN groups"
        " USING (group_id) ORDER BY transition_id"
    )
    for group_id, state, attempt, is_training in rows:
        before = states.get(group_id, "")
        if state not in _NEXT[before]:
            yield f"group {group_id} went from {before or 'nothing'} to {state}"
        if state == "generating" and attempt != attempts.get(group_id, 0) + 1:
            yield (
                f"group {group_id} has attempt {attempt} after attempt {attempts.get(group_id, 0)}"
            )
        if is_training and not before and num_active >= limit:
            yield (
                f"group {group_id} was admitted while {num_active} were active; (max_staleness + 1)"
                f" x groups_per_step is {limit}"
            )
        if is_training:
            num_active += int(state in _ACTIVE) - int(before in _ACTIVE)
        states[group_id] = state
        attempts[group_id] = attempt
    for group_id, state, attempt in connection.execute(
        "SELECT group_id, state, attempt FROM groups"
    ):
        if states.pop(group_id, None) != state or attempts[group_id] != attempt:
            yield (
                f"group {group_id} is {state}, attempt {attempt}, which is not the end of its"
                " history"
            )
    for group_id in states:
        yield f"group {group_id} has a history but no row"


def _gaps(connection: Connection) -> Iterator[str]:
    """The steps of the surviving history have no gap."""
    steps = "SELECT version FROM steps WHERE undone_s IS NULL ORDER BY version"
    versions = [version for (version,) in connection.execute(steps)]
    if versions != list(range(1, len(versions) + 1)):
        missing = sorted(set(range(1, max(versions) + 1)) - set(versions))
        yield f"the surviving steps are not 1 to {len(versions)}: {missing} are missing"
