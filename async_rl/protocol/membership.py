"""Messages of every process to the supervisor: registration, heartbeats, the member list, metrics,
fatal errors.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from async_rl.core.types import Role, Value
from async_rl.protocol.base import Message, Ok


class Member(Value):
    """One process as the supervisor knows it. address is empty until it serves; version is -1 where
    it has none; devices as in Register.
    """

    name: str
    role: Role
    pid: int
    address: str
    state: str
    waits_for: str
    since_s: float
    version: int
    counters: dict[str, float]
    devices: list[str] = msgspec.field(default_factory=list)


class Register(Message):
    """A process is up and serves at `address` (a ZeroMQ endpoint, or a URL for verifiers).

    devices: of a generator, what receives weights in it, one entry per rank: `cpu`, or the UUID of
    a GPU.
    """

    Reply: ClassVar[type] = Ok
    name: str
    role: Role
    pid: int
    address: str
    devices: list[str] = msgspec.field(default_factory=list)


class Heartbeat(Message):
    """What a process does now. waits_for is empty while it works; since_s is Unix time; counters
    are cumulative.
    """

    Reply: ClassVar[type] = Ok
    name: str
    pid: int
    state: str
    waits_for: str
    since_s: float
    version: int
    counters: dict[str, float]


class Members(Message):
    """The processes that serve now; revision grows with each change."""

    revision: int
    members: list[Member]


class WatchMembers(Message):
    """Request the members once the revision differs from `known_revision`, or after `wait_s`."""

    Reply: ClassVar[type] = Members
    known_revision: int
    wait_s: float


class ReportMetrics(Message):
    """Numbers of one learner step, under their TensorBoard names. is_final: the step's row may be
    written.
    """

    Reply: ClassVar[type] = Ok
    source: str
    step: int
    scalars: dict[str, float]
    histograms: dict[str, list[float]]
    texts: dict[str, str]


class ReportFatal(Message):
    """The process is about to exit non-zero; text is its root cause with traceback. ends_run: it is
    not to be started again.
    """

    Reply: ClassVar[type] = Ok
    name: str
    text: str
    ends_run: bool = False


class Expel(Message):
    """The learner cut this generator off (it missed a push or failed a probe); the supervisor ends
    it and starts it again.
    """

    Reply: ClassVar[type] = Ok
    name: str
    pid: int
    reason: str
