"""Messages of generators to the buffer: tickets and finished groups."""

from async_rl.core.heads import PackedGroup, read_group
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
