"""Replaces the rows of old groups by sums, so that the ledger of a long run stays small.

A trained group takes 424 bytes in `groups`, `transitions` and `trained`; its share of the sums of
its step is one byte. Dropped groups and reported evaluations as old as these steps are counted by
state and reason, and the samples of such an evaluation are deleted. Tables in schema.py.
"""

from __future__ import annotations

from async_rl.buffer.store.writer import Statement

MOST_STEPS = 1000
"""Steps of one transaction: a resumed run may have many, and puts wait until it is committed."""

_STEPS = "SELECT step_id FROM steps WHERE undone_s IS NULL AND version>? AND version<=?"
_GROUPS = f"SELECT group_id FROM trained WHERE step_id IN ({_STEPS})"
_SUMS = (
    "INSERT INTO compacted SELECT steps.version, count(*), max(group_id), max(position),"
    " sum(num_tokens), sum(num_trained_tokens), avg(reward_mean) FROM steps JOIN trained USING"
    " (step_id) JOIN groups USING (group_id) WHERE undone_s IS NULL AND steps.version>? AND"
    " steps.version<=? GROUP BY steps.version"
)
_COUNTED = (
    f"INSERT INTO compacted_counts SELECT ?, {{name}}, count(*) FROM groups WHERE group_id IN"
    f" ({_GROUPS}) GROUP BY 2 ON CONFLICT DO UPDATE SET number = number + excluded.number"
)
_AGES = _COUNTED.format(name="max(train_version - oldest_version, 0)")
_GENERATORS = _COUNTED.format(name="generator")

# Groups that were closed untrained. Only ids below the id of a compacted group are looked at:
# nearly all of these have no rows any more, so no index by state is needed. A resumed run continues
# after the newest id and position, which belong to a group that keeps its sums.
_ENDED = (
    "SELECT group_id FROM groups WHERE group_id < (SELECT max(last_group_id) FROM compacted WHERE"
    " version>? AND version<=?) AND (purpose='train' AND state='dropped' AND"
    " coalesce(train_version, 0) < ? OR purpose='eval' AND state IN ('ready', 'dropped') AND"
    " (evaluation IS NULL OR evaluation IN (SELECT version FROM evaluations WHERE finished_s IS NOT"
    " NULL AND version<=?)))"
)
_ENDED_COUNTED = (
    "INSERT INTO compacted_counts SELECT purpose || ' ' || state, reason, count(*) FROM groups"
    f" WHERE group_id IN ({_ENDED}) GROUP BY 1, 2 ON CONFLICT DO UPDATE SET number = number +"
    " excluded.number"
)
# The last table is read by the selection of rows in all other tables.
_TABLES_OF_TRAINED = ("transitions", "advantages", "groups", "trained")
_TABLES_OF_ENDED = ("transitions", "advantages", "blobs", "trained", "groups")


def compaction(first: int, last: int) -> list[Statement]:
    """Return the statements that compact the groups of the steps after `first` up to `last`, and
    other groups of that time that were not trained.
    """
    steps = (first, last)
    ended = (first, last, last, last)
    # The sums before the deletions: they are computed from the rows.
    return [
        (_SUMS, steps),
        (_AGES, ("age", *steps)),
        (_GENERATORS, ("generator", *steps)),
        *(_delete(table, _GROUPS, steps) for table in _TABLES_OF_TRAINED),
        (_ENDED_COUNTED, ended),
        *(_delete(table, _ENDED, ended) for table in _TABLES_OF_ENDED),
    ]


def _delete(table: str, groups: str, parameters: tuple[int, ...]) -> Statement:
    return f"DELETE FROM {table} WHERE group_id IN ({groups})", parameters
