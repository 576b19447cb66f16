"""The operations that rank 0 of the learner pool sends to the other ranks, one message each.

They are messages and not broadcasts: a rank may wait for the next one for as long as the run waits
for generators, and a collective has a time limit.
"""

from async_rl.core.frozen import Value
from async_rl.core.heads import GroupHead
from async_rl.core.types import IntArray
from async_rl.protocol.base import Request


class _Operation(Value, tag_field="type", tag=True):
    """Base of the operations, which carry their class name on the wire. Their docstrings name the
    result of rank 0, if it has one.
    """


class Step(_Operation):
    """Train the batch that was fetched for `version`, which becomes version + 1: its StepResult."""

    version: int


class Gather(_Operation):
    """Gather the full weights on rank 0."""


class Score(_Operation):
    """Compute the log-probs of rows of token ids: a list of float32 arrays."""

    rows: list[IntArray]


class Save(_Operation):
    """Start a checkpoint: a future that is done when it is complete."""

    version: int
    directory: str


class Restore(_Operation):
    """Restore a checkpoint: its version."""

    directory: str


class EnterDevice(_Operation):
    """Move models and moments to the device."""


class LeaveDevice(_Operation):
    """Move models and moments to host memory."""


class Stop(_Operation):
    """Let the other ranks return."""


# A union of structs: msgspec refuses an operation that a rank does not know.
Operation = Step | Gather | Score | Save | Restore | EnterDevice | LeaveDevice | Stop


class Fetch(Request):
    """rank 0 -> another rank: read your sequences of the batch that version `train_version` trains.

    It replaces an earlier batch of the same version, which was dropped. Answered when all are
    there. pool: as in `Perform`; life: of the learner.
    """

    pool: str
    life: int
    train_version: int
    # The heads without tokens: 0.2 MB where the tokens are 270 MB.
    heads: list[GroupHead]


class Perform(Request):
    """rank 0 -> another rank: take part in this operation after the earlier ones.

    pool: of both ranks, so that a rank never takes part in an operation of another life.
    number: of the operation in the pool; a rank takes part once, however often the request comes.
    """

    pool: str
    number: int
    operation: Operation
