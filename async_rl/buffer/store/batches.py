"""The batches of the steps in a run's store, for who trains them again or compares two runs.

Reads only, also while the run writes. Steps that the learner undid are not part of the history.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.core import codec
from async_rl.core.frozen import frozen
from async_rl.core.types import Group

# The buffer orders a batch by group (buffer/replay.py).
_MEMBERS = (
    "SELECT group_id, prompt_id, rewards, num_tokens, oldest_version, newest_version FROM steps"
    " JOIN trained USING (step_id) JOIN groups USING (group_id) WHERE steps.version=? AND undone_s"
    " IS NULL ORDER BY group_id"
)
# A step is complete if none of its groups lost its trajectories.
_STORED = (
    "SELECT version FROM steps JOIN trained USING (step_id) LEFT JOIN blobs USING (group_id) WHERE"
    " undone_s IS NULL GROUP BY version HAVING count(*) = count(blobs.group_id) ORDER BY version"
)
_PAYLOAD = "SELECT payload FROM blobs WHERE group_id=?"


@frozen
class TrainedGroup:
    """The row of a group, which outlives its trajectories. rewards: of each sample."""

    group_id: int
    prompt_id: str
    rewards: list[float]
    num_tokens: int | None
    oldest_version: int | None
    newest_version: int | None


@contextlib.contextmanager
def recorded_batches(run_dir: Path) -> Iterator[Batches]:
    """Open one moment of a run's store. Raises Unavailable if it does not exist,
    InfrastructureError if it cannot be read.
    """
    with reading(run_dir / STORE_FILE) as connection:
        yield Batches(connection)


class Batches:
    """The trained batches of one moment of a store."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def stored_steps(self) -> list[int]:
        """Return the steps whose trajectories are all in the store, in order."""
        return [int(version) for (version,) in self._connection.execute(_STORED)]

    def rows(self, step: int) -> list[TrainedGroup]:
        """Return the groups that a step trained, in the order of its batch; empty if the store has
        no such step, or if its rows were compacted.
        """
        return [
            TrainedGroup(
                group_id=group_id,
                prompt_id=prompt_id,
                rewards=msgspec.json.decode(rewards or "[]"),
                num_tokens=num_tokens,
                oldest_version=oldest,
                newest_version=newest,
            )
            for group_id, prompt_id, rewards, num_tokens, oldest, newest in (
                self._connection.execute(_MEMBERS, (step,))
            )
        ]

    def batch(self, step: int) -> list[Group] | None:
        """Return the batch that a step trained, in its order, or None if its trajectories are not
        all in the store.
        """
        groups = []
        for row in self.rows(step):
            stored = self._connection.execute(_PAYLOAD, (row.group_id,)).fetchone()
            # A batch is repeated as a whole or not at all: without a group its gradient would
            # differ.
            if stored is None:
                return None
            groups.append(codec.decode(stored[0], Group))
        return groups or None
