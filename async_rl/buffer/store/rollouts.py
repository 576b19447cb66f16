"""The trajectories in a run's store, for people: of a step, or the newest.

Reads only, through a connection of `ledger.reading`, also while the run writes.
"""

from __future__ import annotations

import sqlite3

import msgspec
import numpy as np

from async_rl.core import codec
from async_rl.core.types import FloatArray, Group

_STEP = (
    "(SELECT version FROM trained JOIN steps USING (step_id) WHERE trained.group_id=groups.group_id"
    " AND undone_s IS NULL)"
)

_ADVANTAGES = "SELECT payload FROM advantages WHERE group_id=? ORDER BY sample"


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A stored training group with its prompt and the step that trained it, or None.

    advantages: float32 [response tokens], sample after sample, if a step with a critic trained it.
    """

    group: Group
    prompt: str
    step: int | None
    advantages: FloatArray | None


def rollouts(connection: sqlite3.Connection, *, step: int | None, most: int) -> list[Rollout]:
    """Stored training groups of the step, or of any state if it is None: the newest `most`."""
    where = "" if step is None else f"AND {_STEP}=?"
    rows = connection.execute(
        f"SELECT group_id, payload, text, {_STEP} FROM groups JOIN blobs USING (group_id) JOIN"
        " prompts USING (purpose, prompt_id)"
        f" WHERE purpose='train' {where} ORDER BY group_id DESC LIMIT ?",
        (most,) if step is None else (step, most),
    )
    groups = []
    for group_id, payload, text, trained_by in rows:
        stored = stored_advantages(connection, group_id)
        advantages = None
        # Advantages of an undone step belong to no step of the surviving history.
        if trained_by is not None and stored:
            advantages = np.frombuffer(stored, dtype=np.float16).astype(np.float32)
        groups.append(
            Rollout(
                group=codec.decode(payload, Group),
                prompt=text,
                step=trained_by,
                advantages=advantages,
            )
        )
    return groups


def stored_advantages(connection: sqlite3.Connection, group_id: int) -> bytes:
    """Return the float16 advantages of a group's response tokens, sample after sample; empty if
    none are stored.
    """
    return b"".join(row for (row,) in connection.execute(_ADVANTAGES, (group_id,)))


def stored_steps(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """The first and the last step whose trajectories are stored; None without any."""
    first, last = connection.execute(
        f"SELECT min(step), max(step) FROM (SELECT {_STEP} AS step FROM blobs JOIN groups USING"
        " (group_id))"
    ).fetchone()
    return None if first is None else (first, last)
