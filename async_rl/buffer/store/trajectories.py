"""The trajectories in a run's store, for people and for who trains a step again: of a step, of its
batch, or the newest.

Reads only, also while the run writes. Steps that the learner undid are not part of the history.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from async_rl.buffer.store.ledger import STEP, reading
from async_rl.buffer.store.schema import STORE_FILE
from async_rl.core import codec
from async_rl.core.frozen import frozen
from async_rl.core.types import FloatArray, Group

# The buffer orders a batch by group (buffer/replay.py).
_MEMBERS = (
    "SELECT group_id, prompt_id, rewards, num_tokens, oldest_version, newest_version FROM steps"
    " JOIN trained USING (step_id) JOIN groups USING (group_id) WHERE steps.version=? AND undone_s"
    " IS NULL ORDER BY group_id"
)
# A step is complete if none of its groups lost its trajectories.
_COMPLETE = (
    "SELECT version FROM steps JOIN trained USING (step_id) LEFT JOIN blobs USING (group_id) WHERE"
    " undone_s IS NULL GROUP BY version HAVING count(*) = count(blobs.group_id) ORDER BY version"
)
_NEWEST = (
    f"SELECT group_id, payload, text, {STEP} FROM groups JOIN blobs USING (group_id) JOIN"
    " prompts USING (purpose, prompt_id) WHERE purpose='train' {where} ORDER BY group_id DESC"
    " LIMIT ?"
)
_STEPS = (
    f"SELECT min(step), max(step) FROM (SELECT {STEP} AS step FROM blobs JOIN groups USING"
    " (group_id))"
)
_PAYLOAD = "SELECT payload FROM blobs WHERE group_id=?"
_ADVANTAGES = "SELECT payload FROM advantages WHERE group_id=? ORDER BY sample"


@frozen
class TrainedGroup:
    """The row of a group, which outlives its trajectories. rewards: of each sample."""

    group_id: int
    prompt_id: str
    rewards: list[float]
    num_tokens: int | None
    oldest_version: int | None
    newest_version: int | None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A stored training group with its prompt and the step that trained it, or None.

    advantages: float32 [response tokens], sample after sample, if a step with a critic trained it.
    """

    group: Group
    prompt: str
    step: int | None
    advantages: FloatArray | None


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
        return [int(version) for (version,) in self._connection.execute(_COMPLETE)]

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
        groups = [stored_group(self._connection, row.group_id) for row in self.rows(step)]
        complete = [group for group in groups if group is not None]
        # A batch is repeated as a whole or not at all: without a group its gradient would differ.
        return complete if complete and len(complete) == len(groups) else None


def stored_group(connection: sqlite3.Connection, group_id: int) -> Group | None:
    """Return a group's trajectories, or None if they are not stored any more."""
    row = connection.execute(_PAYLOAD, (group_id,)).fetchone()
    return None if row is None else codec.decode(row[0], Group)


def stored_advantages(connection: sqlite3.Connection, group_id: int) -> bytes:
    """Return the float16 advantages of a group's response tokens, sample after sample; empty if
    none are stored.
    """
    return b"".join(row for (row,) in connection.execute(_ADVANTAGES, (group_id,)))


def rollouts(connection: sqlite3.Connection, *, step: int | None, most: int) -> list[Rollout]:
    """Return the newest `most` stored training groups, of one step or (None) of all."""
    query = _NEWEST.format(where="" if step is None else f"AND {STEP}=?")
    rows = connection.execute(query, (most,) if step is None else (step, most))
    groups = []
    for group_id, payload, text, trained_by in rows:
        stored = stored_advantages(connection, group_id)
        advantages = None
        # Advantages of an undone step belong to no step of the surviving history.
        if trained_by is not None and stored:
            advantages = np.frombuffer(stored, dtype=np.float16).astype(np.float32)
        group = codec.decode(payload, Group)
        groups.append(Rollout(group=group, prompt=text, step=trained_by, advantages=advantages))
    return groups


def stored_steps(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """Return the first and the last step whose trajectories are stored; None without any."""
    first, last = connection.execute(_STEPS).fetchone()
    return None if first is None else (first, last)
