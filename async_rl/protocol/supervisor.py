"""Messages to the supervisor. Of every process: registration, heartbeats, the member list, metrics,
fatal errors. Of people: status, stop, scale.
"""

from collections.abc import Mapping
from typing import Final

from async_rl.core.frozen import Value
from async_rl.core.types import Role
from async_rl.protocol.base import Message, Request

STARTING: Final = "starting"
READY: Final = "ready"
DRAINING: Final = "draining"
SILENT: Final = "silent"
ENDED: Final = "ended"
"""States that the supervisor assigns. Any other state of a member is the stage that its heartbeat
reports.
"""


class PoolCount(Value):
    """The wanted number of processes of a pool, and how many start, serve, and drain.

    work: the purpose of its generators (train, evaluation, both); empty for verifiers.
    """

    pool: str
    wanted: int
    starting: int
    live: int
    draining: int
    work: str = ""


class Member(Value):
    """One process in the supervisor's list.

    address: empty until the process serves. version: -1 in processes without weights. since_s: the
    Unix time of the start of the state. devices: as in Register.
    """

    name: str
    role: Role
    pid: int
    state: str
    since_s: float
    address: str = ""
    waits_for: str = ""
    version: int = -1
    counters: dict[str, float] = {}
    devices: list[str] = []


class Register(Request):
    """A process is ready and serves at `address` (a ZeroMQ endpoint, or the URL of a verifier).

    devices: the devices of a generator that receive weights, one per rank: `cpu` or the UUID of a
    GPU.
    """

    name: str
    role: Role
    pid: int
    address: str
    devices: list[str] = []


class NextBeat(Message):
    """The seconds after which the next heartbeat is due."""

    # The supervisor decides, since only it knows how many processes send heartbeats to it.
    after_s: float


class Heartbeat(Request):
    """The current state of a process.

    waits_for: empty while it works. since_s: Unix time. counters: cumulative, except gauges.
    """

    Reply = NextBeat
    name: str
    pid: int
    state: str
    waits_for: str
    since_s: float
    version: int
    # Cumulative, so a lost heartbeat loses no count.
    counters: dict[str, float]


class Members(Message):
    """The processes of the requested roles that serve at `revision`, which grows with each change
    of any role; without counters.

    since: the revision that `members` replace or extend and that `left` leave; -1 = `members` are
    all that serve.
    """

    revision: int
    members: list[Member]
    # Only the changes: the whole list to each process would grow with the square of their number.
    since: int = -1
    left: list[str] = []


class WatchMembers(Request):
    """Request the changes of these roles since `known_revision` once there are any, or after
    `wait_s`.
    """

    Reply = Members
    known_revision: int
    roles: list[Role]
    wait_s: float


FOLLOWED: Mapping[Role, frozenset[Role]] = {
    "buffer": frozenset({"generator", "gateway"}),
    "generator": frozenset({"buffer", "verifier"}),
    "gateway": frozenset({"buffer", "verifier", "generator", "learner"}),
    "learner": frozenset({"buffer", "generator", "learner"}),
    "verifier": frozenset(),
}
"""The roles that a process of each role calls. Generators do not learn of each other: the start of
each would otherwise be news for all, which grows with the square of their number.
"""


class ReportMetrics(Request):
    """Numbers of one learner step, under their TensorBoard names."""

    source: str
    step: int
    scalars: dict[str, float]


class ReportFatal(Request):
    """The process is about to exit non-zero.

    pid: of the process; the report of an earlier life is not one of the present life.
    text: the root cause. ends_run: another start would fail the same way, so the run stops.
    """

    name: str
    pid: int
    text: str
    ends_run: bool = False


class Expel(Request):
    """The learner removed this generator, which missed a push or failed a probe.

    The supervisor stops the process and starts it again.
    """

    name: str
    pid: int
    reason: str


class StatusReply(Message):
    """A snapshot of the run for `async-rl status`.

    metrics: the newest value of every scalar. stalled: the reason why no learner step completes;
    empty while steps do. restarts and restarted_because: the number and the last reason, for each
    process that was restarted.
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
    restarted_because: dict[str, str] = {}
    restarts: dict[str, int] = {}
    pools: list[PoolCount] = []


class GetStatus(Request):
    """Request a snapshot."""

    Reply = StatusReply


class StopRun(Request):
    """Stop the run: after the current step and a checkpoint, or immediately if not graceful."""

    is_graceful: bool


class Scale(Request):
    """Set the number of processes of these pools; other pools keep theirs."""

    # Numbers of processes, not differences: a repeated request must not add processes twice.
    wanted: dict[str, int]
