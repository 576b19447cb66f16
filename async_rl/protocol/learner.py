"""Messages of the learner to the buffer and the supervisor: batches, commits, the version that it
resumes from.
"""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.types import FloatArray, Group
from async_rl.protocol.base import Message, Ok


class TakenGroups(Message):
    """groups_per_step groups, oldest admission first; without groups, waits_for says why."""

    groups: list[Group]
    waits_for: str


class TakeBatch(Message):
    """Lease the batch that will be trained on weights of version `train_version` (step
    train_version + 1).

    A repeated request with the same train_version returns the same groups.
    """

    Reply: ClassVar[type] = TakenGroups
    train_version: int
    wait_s: float


class CommitStep(Message):
    """The step from version - 1 to `version` is done; group_ids were trained by it.

    Safe to send again.
    """

    Reply: ClassVar[type] = Ok
    version: int
    group_ids: list[int]


class StartEvaluation(Message):
    """Evaluate the held-out prompts with `version` once a generator has it; the supervisor gets the
    results as metrics of step=version.
    """

    Reply: ClassVar[type] = Ok
    version: int


class SyncVersion(Message):
    """The learner starts or resumes at `version`: leases without commit are returned."""

    Reply: ClassVar[type] = Ok
    version: int


class StartFrom(Message):
    """learner -> supervisor: the learner starts at `version`; metrics of later steps belong to a
    discarded history.
    """

    Reply: ClassVar[type] = Ok
    version: int


class KeepAdvantages(Message):
    """learner -> buffer: the advantages of each response token of these groups, all samples of a
    group in one row; people read them.
    """

    Reply: ClassVar[type] = Ok
    group_ids: list[int]
    rows: list[FloatArray]


class EvaluationScores(Message):
    """Share of held-out prompts solved, by version; finished evaluations only."""

    pass_rates: dict[int, float]


class GetEvaluationScores(Message):
    """learner -> buffer: report the scores of all evaluated versions."""

    Reply: ClassVar[type] = EvaluationScores


class ForgetBefore(Message):
    """learner -> buffer: no process will resume from a version before this one.

    Trajectories that only older versions need may be deleted.
    """

    Reply: ClassVar[type] = Ok
    version: int
