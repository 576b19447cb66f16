"""Replaces the rows of groups that were trained long ago by sums of their step, so that the ledger
of a long run stays small.

A trained group takes 424 bytes in `groups`, `transitions` and `trained`; its share of the sums is
one byte. Dropped groups and evaluations keep their rows. Tables in schema.py.
"""

from __future__ import annotations

from async_rl.buffer.store.writer import Statement

MOST_STEPS = 1000
"""Steps of one transaction: a resumed run may have many, and puts wait meanwhile."""

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


def compaction(first: int, last: int) -> list[Statement]:
    """Return the statements that compact the groups of the steps after `first` up to `last`."""
    steps = (first, last)
    deleted = [(f"DELETE FROM {table} WHERE group_id IN ({_GROUPS})", steps) for table in _TABLES]
    return [
        (_SUMS, steps),
        (_AGES, ("age", *steps)),
        (_GENERATORS, ("generator", *steps)),
        *deleted,
    ]


# The last one is what the selection of the others reads.
_TABLES = ("transitions", "advantages", "groups", "trained")
