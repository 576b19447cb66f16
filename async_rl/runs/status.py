"""A run's configuration, state and result, while it runs and after its end."""

import enum
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from async_rl.composition.problems import problems_of
from async_rl.composition.schema import expand
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.monitoring.status import duration, short_path
from async_rl.protocol.supervisor import Member, PoolCount
from async_rl.runs.control import ask_status, living_pid
from async_rl.runs.metrics import Curves, newest_row
from async_rl.service.address import FOLDER as SERVICE_FOLDER
from async_rl.training import checkpoints

JOB_FILE = "job.sh"
"""The script of a run that waits in a queue. Its launcher leaves it in the run's directory."""
CONTROL_FILE = "control.json"


_NUM_AVERAGED = 5  # rewards of single steps differ by more than a run gains in a few steps


class RunState(enum.StrEnum):
    """The state of a run.

    `queued`: its Slurm job has not started. `starting`: its processes do not answer yet. `running`:
    they do. `finished`: it completed all steps. `stopped`: it was stopped by a person or a signal.
    `failed`: an error stopped it. `killed`: it exited without reporting an outcome.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def is_live(self) -> bool:
        """Return whether a run in this state has processes, or will have when its job starts."""
        return self in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING)


class _Ending(msgspec.Struct, frozen=True):
    """state.json, which the supervisor writes at the end of the run."""

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
    members: list[Member] = []
    pools: list[PoolCount] = []
    stalled: str = ""
    restarted_because: dict[str, str] = {}
    restarts: dict[str, int] = {}
    tensorboard_url: str = ""
    started_s: float | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the run has processes, or will have when its job starts."""
        return self.state.is_live


def config_of(run_dir: Path) -> RunConfig:
    """Read the run's resolved configuration. Raises ConfigError if it cannot be read."""
    try:
        tree = msgspec.yaml.decode((run_dir / "config.yaml").read_bytes(), type=dict[str, Any])
        expand(tree)
        # Checked by name, so that a configuration of another version is reported with its first
        # unknown setting and not with a traceback of pydantic.
        problems = problems_of(tree)
        if problems:
            first = next(iter(problems.values()))
            raise ConfigError(
                f"{run_dir}/config.yaml is damaged or of another version of async_rl ({first});"
                " restore it from a copy, or read this run with the version that made it"
            )
        return RunConfig.model_validate(tree)
    except (OSError, msgspec.DecodeError) as error:
        reason = " ".join(str(error).split())  # a YAML error has several lines
        raise ConfigError(
            f"{run_dir}/config.yaml cannot be read: {reason}; restore it from a copy"
        ) from error


def status_of(run_dir: Path) -> RunStatus:
    """Ask the run for its status, or read it from its files if it does not answer. Raises
    ConfigError if its configuration cannot be read.
    """
    reply = ask_status(run_dir) if living_pid(run_dir) is not None else None
    if reply is not None:
        # A RunStatus has every field of the answer, and the state.
        values = msgspec.structs.asdict(reply)
        return RunStatus(**values, state=RunState.RUNNING, cause="")
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
    """Return (state, cause of a failure) of a run from its process and its files, without a call
    of the process.
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


@frozen
class Evaluation:
    """A held-out result. error: half the width of its 95 % interval, if it is known."""

    step: int
    pass_at_1: float
    error: float | None

    @property
    def text(self) -> str:
        """The result with its interval."""
        interval = "" if self.error is None else f" ± {self.error:.3f}"
        return f"{self.pass_at_1:.3f}{interval}"

    def __str__(self) -> str:
        return f"{self.text} at step {self.step}"


@frozen
class Result:
    """The result of a run so far. evaluations: in order of their steps. rewards: mean reward of
    each step. duration_s: from the start to the last step; None before the first row.
    """

    evaluations: Sequence[Evaluation]
    rewards: Sequence[float]
    duration_s: float | None

    def best(self, steps: Sequence[int] | None = None) -> Evaluation | None:
        """Return the best evaluation, of all steps or of these; the first one of equal results."""
        usable = [e for e in self.evaluations if steps is None or e.step in steps]
        # Equal results: the earlier step, which took less compute.
        return max(usable, key=lambda evaluation: evaluation.pass_at_1, default=None)


def result_of(curves: Curves) -> Result:
    """Return the result that the metrics of a run show."""
    errors = dict(zip(*curves.points("eval/pass_at_1_error"), strict=True))
    # The largest, because the row of step 0 may be written after the row of step 1.
    times = curves.points("time_s")[1]
    return Result(
        evaluations=[
            Evaluation(step=int(step), pass_at_1=float(value), error=errors.get(step))
            for step, value in zip(*curves.points("eval/pass_at_1"), strict=True)
        ],
        rewards=curves.points("reward/mean")[1].tolist(),
        duration_s=float(times.max()) if len(times) else None,
    )


def result_lines(run_dir: Path) -> Iterator[str]:
    """Yield the result of a run and the commands that continue from here; nothing if no step was
    reported.
    """
    curves = Curves(run_dir)
    curves.refresh()
    result = result_of(curves)
    if result.duration_s is None:
        return
    if result.evaluations:
        yield f"held-out pass@1 {_held_out(result)}"
    if result.rewards:
        # A short run has fewer steps than a mean needs.
        number = min(_NUM_AVERAGED, len(result.rewards))
        first = sum(result.rewards[:number]) / number
        last = sum(result.rewards[-number:]) / number
        means = f"(means of the first and the last {number} steps)"
        yield f"reward          {first:.3f} to {last:.3f} {means}"
    yield f"time            {duration(result.duration_s)}"
    # A service keeps its states by training run.
    if (run_dir / SERVICE_FOLDER).exists():
        yield f"continue        async-rl resume {run_dir.name}"
        return
    # Only a saved step can be resumed, evaluated or exported, so only these are named.
    saved = checkpoints.versions(run_dir)
    best = result.best(saved)
    if not saved:
        yield "checkpoints     none: the run stopped before its first checkpoint"
    else:
        steps = ", ".join(map(str, saved))
        choice = f"; the best of them by held-out pass@1 is step {best.step}" if best else ""
        yield f"checkpoints     steps {steps}{choice}"
    yield f"numbers         {short_path(run_dir / 'metrics.jsonl')}"
    name = run_dir.name
    yield f"look at it      async-rl view {name}; async-rl rollouts {name}"
    if saved:
        # A run that has reached its last step needs another one.
        is_done = saved[-1] >= config_of(run_dir).num_steps
        further = f" num_steps={2 * saved[-1]}" if is_done else ""
        yield (
            f"continue        async-rl resume {name}{further}; async-rl eval {name}; async-rl"
            f" export {name} model/"
        )


def _held_out(result: Result) -> str:
    ends = [result.evaluations[0], result.evaluations[-1]]
    texts = [str(each) for each in dict.fromkeys(ends)]
    best = result.best()
    if best not in ends:
        texts.append(f"best {best}")
    return ", ".join(texts)
