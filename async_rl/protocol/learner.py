"""Messages of the learner to the buffer and the supervisor: batches, commits, its place in the
history of the run.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.types import FloatArray, Group
from async_rl.protocol.base import Message, Ok


class TakenGroups(Message):
    """groups_per_step groups, oldest admission first; empty if none within the wait (waits_for says
    why).
    """

    groups: list[Group]
    waits_for: str


class TakeBatch(Message):
    """Lease the batch that will be trained on weights of version `train_version` (step
    train_version + 1).

    Asking again for the same train_version gives the same groups.
    """

    Reply: ClassVar[type] = TakenGroups
    train_version: int
    wait_s: float


class CommitStep(Message):
    """The step that turned version - 1 into `version` is done; group_ids were trained by it.

    Safe to send again.
    """

    Reply: ClassVar[type] = Ok
    version: int
    group_ids: list[int]


class StartEvaluation(Message):
    """Evaluate the held-out prompts with `version` once a generator holds it; results go to the
    supervisor as metrics of step=version.
    """

    Reply: ClassVar[type] = Ok
    version: int


class SyncVersion(Message):
    """The learner starts (again) at `version`: leases without commit go back. Reply gives the
    buffer's own count.
    """

    Reply: ClassVar[type] = Ok
    version: int


class StartFrom(Message):
    """learner -> supervisor: the learner starts at `version`; numbers of later steps belong to a
    history that is given up.
    """

    Reply: ClassVar[type] = Ok
    version: int


class KeepAdvantages(Message):
    """learner -> buffer: what the step made of each response token of these groups, all samples of
    a group in one row; for people.
    """

    Reply: ClassVar[type] = Ok
    group_ids: list[int]
    rows: list[FloatArray]


class EvaluationScores(Message):
    """Share of held-out prompts solved, by version; finished evaluations only."""

    pass_rates: dict[int, float]


class GetEvaluationScores(Message):
    """learner -> buffer: how good were the versions?"""

    Reply: ClassVar[type] = EvaluationScores


class ForgetBefore(Message):
    """learner -> buffer: nobody will go back to a version before this one; trajectories that only
    that would need may go.
    """

    Reply: ClassVar[type] = Ok
    version: int
