"""The operations that rank 0 of the learner pool sends to the other ranks, one message each.

They are messages and not broadcasts: a rank may wait for the next one for as long as the run waits
for generators, and a collective has a time limit.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.types import Group, IntArray, Value
from async_rl.protocol.base import Message, Ok


class Step(Value, tag_field="type", tag=True):
    """Train one batch: `version` becomes version + 1."""

    version: int
    groups: list[Group]


class Gather(Value, tag_field="type", tag=True):
    """Gather the full weights on rank 0."""


class Score(Value, tag_field="type", tag=True):
    """Compute the log-probs of rows of token ids."""

    rows: list[IntArray]


class Save(Value, tag_field="type", tag=True):
    """Begin a checkpoint."""

    version: int
    directory: str


class Restore(Value, tag_field="type", tag=True):
    """Restore a checkpoint."""

    directory: str


class EnterDevice(Value, tag_field="type", tag=True):
    """Move models and moments to the device."""


class LeaveDevice(Value, tag_field="type", tag=True):
    """Move models and moments to host memory."""


class Stop(Value, tag_field="type", tag=True):
    """Let the other ranks return."""


Operation = Step | Gather | Score | Save | Restore | EnterDevice | LeaveDevice | Stop


class Perform(Message):
    """rank 0 -> another rank: take part in this operation after the earlier ones.

    pool: of both ranks, so that a rank never takes part in an operation of another life.
    """

    Reply: ClassVar[type] = Ok
    pool: str
    operation: Operation
