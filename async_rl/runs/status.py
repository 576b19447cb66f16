"""The state of a run as one typed value, while it runs and after its end."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from async_rl.protocol.membership import Member, PoolCount
from async_rl.runs.config import config_of
from async_rl.runs.control import ask_status, living_pid
from async_rl.runs.metrics import newest_row

JOB_FILE = "job.sh"
"""The script of a run that waits in a queue. Its launcher leaves it in the run's directory."""
CONTROL_FILE = "control.json"


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


class _Ending(msgspec.Struct, frozen=True):
    """state.json, which the supervisor writes when the run ends."""

    outcome: RunState
    cause: str = ""


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
        return is_live(self.state)


def is_live(state: RunState) -> bool:
    """Return whether a run in this state has processes, or will have when its job starts."""
    return state in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING)


def status_of(run_dir: Path) -> RunStatus:
    """Ask the run for its status, or read it from its files if it does not answer. Raises
    ConfigError if its configuration cannot be read.
    """
    return live_status(run_dir) or stored_status(run_dir)


def live_status(run_dir: Path) -> RunStatus | None:
    """Return what the run's supervisor answers, or None if it does not answer."""
    reply = ask_status(run_dir) if living_pid(run_dir) is not None else None
    if reply is None:
        return None
    values = {name: getattr(reply, name) for name in reply.__struct_fields__}
    return RunStatus(**values, state=RunState.RUNNING, cause="")


def stored_status(run_dir: Path) -> RunStatus:
    """Read the state of a run from its files and its process. Raises ConfigError if its
    configuration cannot be read.
    """
    config = config_of(run_dir)
    last = newest_row(run_dir)
    state, cause = state_of(run_dir)
    return RunStatus(
        run_name=run_dir.name,
        run_dir=str(run_dir),
        # A supervisor that has not answered is still starting, or is busy with that.
        state=RunState.STARTING if state is RunState.RUNNING else state,
        step=int(last.get("step", 0)),
        num_steps=config.num_steps,
        cause=cause,
        metrics=last,
    )


def state_of(run_dir: Path) -> tuple[RunState, str]:
    """Return (state, cause of a failure) of a run from its process and its files, without asking
    the process.
    """
    if living_pid(run_dir) is not None:
        has_control = (run_dir / CONTROL_FILE).is_file()
        return (RunState.RUNNING if has_control else RunState.STARTING), ""
    return ending(run_dir)


def ending(run_dir: Path) -> tuple[RunState, str]:
    """Return (state, cause of a failure) of a run without processes, from its files."""
    try:
        end = msgspec.json.decode((run_dir / "state.json").read_bytes(), type=_Ending)
    except (OSError, msgspec.DecodeError):
        # The supervisor in the job writes control.json soon after its start.
        is_queued = (run_dir / JOB_FILE).is_file() and not (run_dir / CONTROL_FILE).is_file()
        return (RunState.QUEUED if is_queued else RunState.KILLED), ""
    return end.outcome, end.cause
