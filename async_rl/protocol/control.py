"""Messages of people to the supervisor: status, stop, scale."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from async_rl.core.types import PoolCount
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.membership import Member


class StatusReply(Message):
    """A snapshot for `async-rl status`. metrics is the newest value of every scalar; stalled says
    why no step comes, if none does.

    restarted_because: of each process that was started again, why the last time.
    """

    run_name: str
    run_dir: str
    step: int
    num_steps: int
    started_s: float
    tensorboard_url: str
    members: list[Member]
    metrics: dict[str, float]
    stalled: str = ""
    restarted_because: dict[str, str] = msgspec.field(default_factory=dict)
    pools: list[PoolCount] = msgspec.field(default_factory=list)


class GetStatus(Message):
    """Ask for a snapshot."""

    Reply: ClassVar[type] = StatusReply


class StopRun(Message):
    """Finish the step, save, leave; at once if not graceful."""

    Reply: ClassVar[type] = Ok
    is_graceful: bool


class Pools(Message):
    """The pools as they are now."""

    pools: list[PoolCount]


class Scale(Message):
    """people -> supervisor: so many processes of these pools from now on; pools that are not named
    stay as they are.

    is_forced: even if memory does not seem to suffice.
    """

    Reply: ClassVar[type] = Pools
    wanted: dict[str, int]
    is_forced: bool
