"""The trajectories in a run's store, for people and for who trains a step again: of a step, of its
batch, or the newest.

Reads only, also while the run writes. Steps that the learner undid are not part of the history.
"""

from __future__ import annotations

import msgspec
import numpy as np

from async_rl.buffer.store.browse import Filter, page_of, prompt_text
from async_rl.buffer.store.connection import PAYLOAD, Connection, intact
from async_rl.buffer.store.ledger import OF_STEP, STEP, GroupRow, group_rows
from async_rl.core.types import FloatArray, Group

# A step is complete if none of its groups lost its trajectories.
_COMPLETE = (
    "SELECT version FROM steps JOIN trained USING (step_id) LEFT JOIN blobs USING (group_id) WHERE"
    " undone_s IS NULL GROUP BY version HAVING count(*) = count(blobs.group_id) ORDER BY version"
)
_STEPS = (
    f"SELECT min(step), max(step) FROM (SELECT {STEP} AS step FROM blobs JOIN groups USING"
    " (group_id))"
)
_PAYLOAD = f"SELECT {PAYLOAD} WHERE group_id=?"
_ADVANTAGES = "SELECT payload FROM advantages WHERE group_id=? ORDER BY sample"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A stored group with its prompt and the step that trained it, or None.

    advantages: float32 [response tokens], sample after sample, if a step with a critic trained it.
    """

    group: Group
    prompt: str
    step: int | None
    advantages: FloatArray | None


def complete_steps(store: Connection) -> list[int]:
    """Return the steps whose trajectories are all in the store, in order."""
    return [version for (version,) in store.execute(_COMPLETE)]


def batch_rows(store: Connection, step: int) -> list[GroupRow]:
    """Return the groups that a step trained, in the order of its batch; empty if the store has
    no such step, or if its rows were compacted.
    """
    # The buffer orders a batch by group (buffer/replay.py).
    return group_rows(store, f"{OF_STEP} ORDER BY group_id", [step])


def batch_of(store: Connection, step: int) -> list[Group] | None:
    """Return the batch that a step trained, in its order, or None if its trajectories are not
    all in the store.
    """
    groups = [_group(store, row.group_id) for row in batch_rows(store, step)]
    complete = [group for group in groups if group is not None]
    # A batch is repeated as a whole or not at all: without a group its gradient would differ.
    return complete if complete and len(complete) == len(groups) else None


def _group(store: Connection, group_id: int) -> Group | None:
    row = store.execute(_PAYLOAD, (group_id,)).fetchone()
    return None if row is None else intact(group_id, row[0]).unpacked()


def rollout_of(store: Connection, row: GroupRow) -> Rollout | None:
    """Return a group with its trajectories, or None if they are not stored any more."""
    group = _group(store, row.group_id)
    if group is None:
        return None
    # In float16, one blob per sample. Those of an undone step belong to no step of the surviving
    # history.
    stored = b"".join(blob for (blob,) in store.execute(_ADVANTAGES, (row.group_id,)))
    advantages = None
    if stored and row.step is not None:
        advantages = np.frombuffer(stored, dtype=np.float16).astype(np.float32)
    prompt = prompt_text(store, row.purpose, row.prompt_id)
    return Rollout(group=group, prompt=prompt, step=row.step, advantages=advantages)


def rollouts(store: Connection, *, step: int | None, most: int) -> list[Rollout]:
    """Return the newest `most` stored training groups, of one step or (None) of all."""
    rows = page_of(store, Filter(step=step, stored=True), most=most)
    return [rollout for row in rows if (rollout := rollout_of(store, row)) is not None]


def stored_steps(store: Connection) -> tuple[int, int] | None:
    """Return the first and the last step whose trajectories are stored; None without any."""
    first, last = store.execute(_STEPS).fetchone()
    return None if first is None else (first, last)
