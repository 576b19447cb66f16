"""Everything that processes say to each other over ZeroMQ, as typed MessagePack.

Each request names its reply in the class attribute `Reply`; `wire/rpc.py` sends requests and checks replies.
Invariants: every request to the buffer may be sent twice without harm (it is recognised by its ids); no message names code.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from async_rl.types import FloatArray, Group, IntArray, PoolCount, Role, Ticket, Value


class Message(Value, tag_field="type", tag=True):
    """Base of requests and replies."""


class Ok(Message):
    """Done."""


class Failure(Message):
    """The handler raised `error` (a name from errors.py) with `message`."""

    error: str
    message: str


# ---- membership: every process -> supervisor


class Member(Value):
    """One process as the supervisor knows it. address is empty until it serves; version is -1 where it has none; devices as in Register."""

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

    devices: of a generator, what receives weights in it, one entry per rank: `cpu`, or the UUID of a GPU.
    """

    Reply: ClassVar[type] = Ok
    name: str
    role: Role
    pid: int
    address: str
    devices: list[str] = msgspec.field(default_factory=list)


class Heartbeat(Message):
    """What a process does now. waits_for is empty while it works; since_s is Unix time; counters are cumulative."""

    Reply: ClassVar[type] = Ok
    name: str
    pid: int
    state: str
    waits_for: str
    since_s: float
    version: int
    counters: dict[str, float]


class Members(Message):
    """The processes that serve now; epoch grows with each change."""

    epoch: int
    members: list[Member]


class WatchMembers(Message):
    """Answered once the epoch differs from `known_epoch`, or after wait_s with the same epoch."""

    Reply: ClassVar[type] = Members
    known_epoch: int
    wait_s: float


class ReportMetrics(Message):
    """Numbers of one learner step, under their TensorBoard names. is_final: the step's row may be written."""

    Reply: ClassVar[type] = Ok
    source: str
    step: int
    scalars: dict[str, float]
    histograms: dict[str, list[float]]
    texts: dict[str, str]


class ReportFatal(Message):
    """The process is about to exit non-zero; text is its root cause with traceback. ends_run: it is not to be started again."""

    Reply: ClassVar[type] = Ok
    name: str
    text: str
    ends_run: bool = False


# ---- people -> supervisor


class StatusReply(Message):
    """A snapshot for `async-rl status`. metrics is the newest value of every scalar; stalled says why no step comes, if none does.

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


# ---- generator -> buffer


class Work(Message):
    """Tickets for a generator; empty when none became free within the wait (waits_for says why)."""

    tickets: list[Ticket]
    waits_for: str = ""


class RequestWork(Message):
    """Ask for up to `credit` training groups, or as many samples of an evaluation; parked up to wait_s.

    version: what the engine samples with now.

    A newer request of the same generator answers its parked one (empty): ask again whenever `version` changes.  held: the group ids of the
    tickets it has and whose put is not acknowledged; tickets that an earlier reply lost are given again.  None: not told.
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
    """The generator (this incarnation, or every one if empty) is gone; its unfinished tickets go back."""

    Reply: ClassVar[type] = Ok
    generator: str
    incarnation: str


class LimitStaleness(Message):
    """Admit as if max_staleness_versions were this, at most the configured one; 0 makes the run synchronous until told otherwise."""

    Reply: ClassVar[type] = Ok
    max_staleness_versions: int


# ---- learner -> buffer


class Batch(Message):
    """groups_per_step groups, oldest admission first; empty if none within the wait (waits_for says why)."""

    groups: list[Group]
    waits_for: str


class TakeBatch(Message):
    """Lease the batch that will be trained on weights of version `train_version` (step train_version + 1).

    Asking again for the same train_version gives the same groups.
    """

    Reply: ClassVar[type] = Batch
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
    """Evaluate the held-out prompts with `version` once a generator holds it; results go to the supervisor as metrics of step=version."""

    Reply: ClassVar[type] = Ok
    version: int


class SyncVersion(Message):
    """The learner starts (again) at `version`: leases without commit go back. Reply gives the buffer's own count."""

    Reply: ClassVar[type] = Ok
    version: int


# ---- learner -> generator


class TensorEntry(Value):
    """One tensor in the shared block: Hugging Face name, torch dtype name, shape, byte offset and size."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    size_bytes: int


class Manifest(Value):
    """One version of the weights in memory shared on one host.

    path: a file to map (/proc/<pid>/fd/<n> of a memfd, so nothing outlives its owners).  The block starts with a header that carries
    `version`; a reader checks it before and after reading.  checksum: over the bytes of all tensors, in order.
    """

    version: int
    path: str
    tensors: list[TensorEntry]
    total_bytes: int
    checksum: int


class LoadReport(Message):
    """The generator samples with `version` now. Seconds: whole load, and how long generation stood still."""

    version: int
    load_s: float
    pause_s: float


class LoadWeights(Message):
    """Load this version between two engine steps; requests in flight go on. url: the file to read instead of the shared block.

    turn: with placement=colocated, of the learner that gives the device back by this (weights/turns.py).
    """

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    url: str = ""
    turn: int = 0


class Logprobs(Message):
    """float32 log-probs of each row's tokens 1.. (first token has none, 0), concatenated per row, with the version used."""

    version: int
    rows: list[FloatArray]


class Probe(Message):
    """Score these token rows with the weights held now (temperature 1)."""

    Reply: ClassVar[type] = Logprobs
    rows: list[IntArray]


# ---- learner -> supervisor


class Expel(Message):
    """The learner cut this generator off (it missed a push or failed a probe); the supervisor ends it and starts it again."""

    Reply: ClassVar[type] = Ok
    name: str
    pid: int
    reason: str
