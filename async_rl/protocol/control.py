"""Messages of people to the supervisor: status, stop, scale."""

from async_rl.protocol.base import Message, Request
from async_rl.protocol.membership import Member, PoolCount


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
