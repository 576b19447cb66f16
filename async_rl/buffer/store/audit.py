"""Checks of the promises about states and staleness over the whole history of a store.

The promises: every group is in one state and reached it by allowed changes; no prompt was left out
or issued twice; admission kept its bound; nothing over age was leased or trained; in the surviving
history steps follow each other without a gap, each trained exactly its groups, and each group was
trained once; what may still be trained is stored. Tables in schema.py.

The history of compacted groups is deleted. Only their counts are checked, and the audit reports it.
"""

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
_ALLOWED = ", ".join(f"'{state}>{then}'" for state, all_next in _NEXT.items() for then in all_next)
_ACTIVE = "IN ('issued', 'generating', 'ready', 'leased')"
# Each change with the state and the attempt before it: '' and 0 before the first change of a group.
_CHANGES = (
    "(SELECT group_id, transition_id, purpose, t.state, t.attempt, lag(t.state, 1, '') OVER one AS"
    " before, lag(t.attempt, 1, 0) OVER one AS tried FROM transitions t LEFT JOIN groups USING"
    " (group_id) WINDOW one AS (PARTITION BY group_id ORDER BY transition_id))"
)
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
    # Every change was allowed, and each history agrees with the state of its group.
    (
        "group {} went from {} to {}",
        f"SELECT group_id, iif(before='', 'nothing', before), state FROM {_CHANGES} WHERE before ||"
        f" '>' || state NOT IN ({_ALLOWED})",
    ),
    (
        "group {} has attempt {} after attempt {}",
        f"SELECT group_id, attempt, tried FROM {_CHANGES} WHERE state='generating' AND attempt !="
        " tried + 1",
    ),
    (
        "group {} is {}, attempt {}, which is not the end of its history",
        "SELECT group_id, g.state, g.attempt FROM groups g LEFT JOIN (SELECT group_id, state,"
        " attempt, max(transition_id) FROM transitions GROUP BY group_id) t USING (group_id) WHERE"
        " (g.state, g.attempt) IS NOT (t.state, t.attempt)",
    ),
    (
        "group {} has a history but no row",
        "SELECT DISTINCT group_id FROM transitions WHERE group_id NOT IN (SELECT group_id FROM"
        " groups)",
    ),
    # The bound of admission is about each moment, so all changes count in their order.
    (
        "group {} was admitted while {} were active; (max_staleness + 1) x groups_per_step is {}",
        f"SELECT group_id, active, bound FROM (SELECT group_id, before, sum((state {_ACTIVE}) -"
        f" (before {_ACTIVE})) OVER (ORDER BY transition_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1"
        " PRECEDING) AS active, (:max_staleness_versions + 1) * :groups_per_step AS bound FROM"
        f" {_CHANGES} WHERE purpose='train') WHERE before='' AND active >= bound",
    ),
    (
        "the surviving steps {} to {} are missing",
        "SELECT before + 1, version - 1 FROM (SELECT version, lag(version, 1, 0) OVER (ORDER BY"
        " version) AS before FROM steps WHERE undone_s IS NULL) WHERE version != before + 1",
    ),
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
        problems = list(selected(_BROKEN))
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
