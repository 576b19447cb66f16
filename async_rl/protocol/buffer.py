"""Messages to the buffer. Of generators: tickets and finished groups. Of the learner, also to the
supervisor: batches, commits, the version that it resumes from.
"""

from async_rl.core.heads import GroupHead, PackedGroup, PackedTrajectory, SampleId, read_group
from async_rl.core.types import DropReason, Ticket
from async_rl.protocol.base import Message, Request


class Work(Message):
    """Tickets for a generator; empty when none became free within the wait (waits_for says why)."""

    tickets: list[Ticket]
    waits_for: str = ""


class RequestWork(Request):
    """Request up to `credit` training groups, or the same number of samples of an evaluation; the
    request is parked up to wait_s.

    version: the version that the engine samples with now.  life: of the learner that made it; None:
    not reported.

    A newer request of the same generator answers its parked request without tickets, so a generator
    sends another one whenever `version` changes.  held: the group ids of its tickets whose put is
    not acknowledged yet; tickets lost with an earlier reply are issued again.  None: not reported.
    """

    Reply = Work
    generator: str
    incarnation: str
    version: int
    credit: int
    wait_s: float
    # The buffer cannot know which replies arrived. Without this list a ticket that was lost with a
    # reply would block its batch until the ticket's time limit, which may be an hour.
    held: list[int] | None = None
    # The learner may have gone back since, and made other weights of the same version.
    life: int | None = None


class PutGroup(Request):
    """A complete group (heads.pack_group); acknowledged once it is stored. Safe to send again."""

    # Encoded apart from the message: these bytes are stored as they arrive.
    payload: memoryview

    @property
    def group(self) -> PackedGroup:
        """Return the group. Raises ProtocolError if it cannot be decoded."""
        return read_group(self.payload)


class FailGroup(Request):
    """The attempt failed for a reason outside the policy; the ticket returns to the buffer."""

    group_id: int
    # A late message about an earlier attempt must not end the present attempt.
    attempt: int
    reason: DropReason
    message: str


class FromLearner(Request):
    """Base of the messages that a life of the learner sends after `SyncVersion`.

    life: as in `Synced`. Earlier lives are refused with Superseded, because the learner may have
    been replaced while it could not be reached.
    """

    # Lives count from 1, so a message without its life is refused once a learner has started.
    life: int = 0


class TakenGroups(Message):
    """The heads of groups_per_step groups, oldest admission first; none if they are not ready."""

    groups: list[GroupHead]


class TakeBatch(FromLearner, kw_only=True):
    """Lease the batch that will be trained on weights of version `train_version` (step
    train_version + 1).

    A repeated request with the same train_version returns the same groups.
    """

    Reply = TakenGroups
    train_version: int
    wait_s: float


class Sequences(Message):
    """The requested sequences, in the order of the request."""

    trajectories: list[PackedTrajectory]


class ReadSequences(FromLearner, kw_only=True):
    """A rank of the learner reads sequences of the leased batch of train_version.

    It reads its own sequences only, in chunks. Refused with ProtocolError if a group is not of
    that batch.
    """

    Reply = Sequences
    train_version: int
    # Samples, not groups: the ranks divide a batch by tokens, so a group may belong to two ranks.
    samples: list[SampleId]


class CommitStep(FromLearner, kw_only=True):
    """The step from version - 1 to `version` is done; group_ids were trained by it.

    Safe to send again.
    """

    version: int
    # Compared with the lease: a step of other groups is refused before it is on record.
    group_ids: list[int]


class StartEvaluation(FromLearner, kw_only=True):
    """Evaluate the held-out prompts with `version` once a generator has it; the supervisor gets the
    results as metrics of step=version.
    """

    version: int


class History(Message):
    """The versions that the learner may start from: first to last."""

    first: int
    last: int


class GetHistory(Request):
    """Report the versions that the store covers."""

    Reply = History


class Synced(Message):
    """life: the number of the learner's life, larger than the numbers of all earlier lives."""

    life: int


class SyncVersion(Request):
    """The learner starts or resumes at `version`: leases without commit are returned.

    incarnation: identifies the life of the learner's process.
    """

    Reply = Synced
    version: int
    # A repeated request of one process must not start a second life.
    incarnation: str = ""


class SecureStore(FromLearner, kw_only=True):
    """Write what was acknowledged to the disk: no power loss leaves a checkpoint ahead of it."""


class SetAside(Message):
    """num_batches: batches that were dropped for this train_version, this one included."""

    num_batches: int


class DropBatch(FromLearner, kw_only=True):
    """The leased batch of train_version cannot be trained: its groups are dropped as untrainable
    with `message`, and later leases are returned. Safe to send again.
    """

    Reply = SetAside
    train_version: int
    group_ids: list[int]
    message: str


class StartFrom(FromLearner, kw_only=True):
    """To the supervisor: the learner starts at `version`; metrics of later steps belong to a
    discarded history.
    """

    version: int


class EvaluationScores(Message):
    """Share of held-out prompts solved, by version; finished evaluations only."""

    pass_rates: dict[int, float]


class GetEvaluationScores(Request):
    """Report the scores of all evaluated versions."""

    Reply = EvaluationScores


class ForgetBefore(FromLearner, kw_only=True):
    """No process will resume from a version before this one. Trajectories that only older versions
    need may be deleted.
    """

    version: int
