"""The state of a run as one typed value, while it runs and after its end."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import ask_status, living_pid
from async_rl.protocol.membership import Member, PoolCount


class RunState(enum.StrEnum):
    """The state of a run.

    `queued`: its Slurm job has not started. `starting`: its processes do not answer yet. `running`:
    they do. `finished`: it completed all steps. `stopped`: it was stopped by a person or a signal.
    `failed`: an error ended it. `killed`: it ended without reporting an outcome.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "killed"


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a run. The attributes from `members` on are empty unless the run answers.

    Attributes:
        run_name: The name of its directory.
        run_dir: Its directory.
        state: Its state.
        step: Learner steps done.
        num_steps: Learner steps to do.
        cause: The reason why it failed; empty otherwise.
        metrics: The newest value of each metric; docs/metrics.md has the units.
        members: Its processes with their state, what each waits for, and its policy version.
        pools: The wanted and present number of processes of each pool.
        stalled: The reason why no step completes; empty while steps do.
        restarted_because: The last reason, for each process that was restarted.
        restarts: The number of restarts, for each process that was restarted.
        tensorboard_url: The address of TensorBoard; empty if it does not run.
        started_s: Unix time of the start, in seconds.
    """

    run_name: str
    run_dir: str
    state: RunState
    step: int
    num_steps: int
    cause: str
    metrics: dict[str, float]
    members: list[Member] = msgspec.field(default_factory=list)
    pools: list[PoolCount] = msgspec.field(default_factory=list)
    stalled: str = ""
    restarted_because: dict[str, str] = msgspec.field(default_factory=dict)
    restarts: dict[str, int] = msgspec.field(default_factory=dict)
    tensorboard_url: str = ""
    started_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the run has processes, or will have when its job starts."""
        return self.state in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING)


_STATE_OF = {"": RunState.KILLED, runs.QUEUED: RunState.QUEUED}


def status_of(run_dir: Path) -> RunStatus:
    """Ask the run for its status, or read it from its files if it does not answer."""
    pid = living_pid(run_dir)
    reply = ask_status(run_dir) if pid is not None else None
    if reply is not None:
        values = {name: getattr(reply, name) for name in reply.__struct_fields__}
        return RunStatus(**values, state=RunState.RUNNING, cause="")
    remains = runs.remains(run_dir)
    if pid is not None:
        state = RunState.STARTING
    else:
        state = _STATE_OF.get(remains.outcome) or RunState(remains.outcome)
    return RunStatus(
        run_name=remains.run_name,
        run_dir=remains.run_dir,
        state=state,
        step=remains.step,
        num_steps=remains.num_steps,
        cause=remains.cause,
        metrics=remains.metrics,
    )
