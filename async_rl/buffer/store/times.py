"""The times of the groups of a run, from its store: hand-out, generation, storing. Reads only."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.schema import STORE_FILE

# The last hand-out before the group was ready: earlier attempts ended without a result.
_TIMES = (
    "SELECT purpose, generator, (SELECT max(at_s) FROM transitions WHERE group_id=groups.group_id"
    " AND state='generating') AS handed_out_s, generation_s, (SELECT max(at_s) FROM transitions"
    " WHERE group_id=groups.group_id AND state='ready') AS ready_s, num_tokens FROM groups WHERE"
    " generation_s IS NOT NULL ORDER BY group_id"
)
_STEPS = "SELECT version, committed_s FROM steps WHERE undone_s IS NULL ORDER BY version"


class GroupTimes(NamedTuple):
    """One finished group. Unix seconds; generation_s: from its start to its last token."""

    purpose: str
    generator: str
    handed_out_s: float
    generation_s: float
    ready_s: float
    num_tokens: int


def group_times(run_dir: Path) -> list[GroupTimes]:
    """Return the finished groups in the order of admission."""
    with reading(run_dir / STORE_FILE) as connection:
        rows = connection.execute(_TIMES).fetchall()
    return [GroupTimes(*row) for row in rows if None not in row]


def step_times(run_dir: Path) -> dict[int, float]:
    """Return the Unix time of each committed step."""
    with reading(run_dir / STORE_FILE) as connection:
        return {int(version): at_s for version, at_s in connection.execute(_STEPS)}
