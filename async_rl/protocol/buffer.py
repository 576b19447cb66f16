"""Messages of generators and the supervisor to the buffer: tickets and finished groups."""

from __future__ import annotations

from typing import ClassVar

from async_rl.core.types import Group, Ticket
from async_rl.protocol.base import Message, Ok


class Work(Message):
    """Tickets for a generator; empty when none became free within the wait (waits_for says why)."""

    tickets: list[Ticket]
    waits_for: str = ""


class RequestWork(Message):
    """Ask for up to `credit` training groups, or as many samples of an evaluation; parked up to
    wait_s.

    version: what the engine samples with now.

    A newer request of the same generator answers its parked one (empty): ask again whenever
    `version` changes.  held: the group ids of its tickets whose put is not acknowledged yet;
    tickets lost with an earlier reply are issued again.  None: not reported.
    """

    Reply: ClassVar[type] = Work
    generator: str
    incarnation: str
    version: int
    credit: int
    wait_s: float
    held: list[int] | None = None


class PutGroup(Message):
    """A complete group. Acknowledged once it is in the store. Safe to send again."""

    Reply: ClassVar[type] = Ok
    group: Group


class FailGroup(Message):
    """The attempt failed for a reason outside the policy; the ticket goes back."""

    Reply: ClassVar[type] = Ok
    group_id: int
    attempt: int
    generator: str
    reason: str
    message: str


class ReleaseGenerator(Message):
    """The generator (this incarnation, or every one if empty) is gone; its unfinished tickets go
    back.
    """

    Reply: ClassVar[type] = Ok
    generator: str
    incarnation: str
