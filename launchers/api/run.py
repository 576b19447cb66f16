"""Runs in Python: start a run, follow its steps, change it, stop it, and read its results.

A run is a background process with its own directory, exactly as `async-rl launch` makes it, so
`async-rl status`, `logs` and `stop` see it too. It survives the Python process that started it;
another process can use `open_run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DeadlineExceeded, RunFailed
from async_rl.core.os import owner_only
from async_rl.core.types import DoubleArray
from async_rl.launchers.api import starting
from async_rl.protocol.supervisor import PoolCount
from async_rl.runs.certificate.certify import certify
from async_rl.runs.certificate.statements import Certificate
from async_rl.runs.control import (
    ask_scale,
    ask_stop,
    living_pid,
    owning,
    wait_for_run,
)
from async_rl.runs.directory import find_run
from async_rl.runs.metrics import Curves, RowReader
from async_rl.runs.samples import MOST_GROUPS, Sample, samples
from async_rl.runs.status import RunState, RunStatus, config_of, status_of

if TYPE_CHECKING:
    from async_rl.launchers.api.session import Session

Overrides = Mapping[str, object] | Sequence[str]
"""Settings that differ from conf/: {"num_steps": 20, "learner": {"ranks": 2}}, with dotted or
nested names, or ["num_steps=20", "learner.ranks=2"] as on the command line.
"""

_POLL_S = 0.3  # files change without an event that every filesystem delivers
_STOP_GRACE_S = 60.0
"""Added to the run's own stop timeout for the last evaluation and the end of the processes."""


class Run:
    """One run, live or finished. Every method can be called in a notebook, where an event loop
    runs.

    Attributes:
        directory: The run's files; docs/durability.md lists them.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"<Run {self.directory}>"

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.name

    @property
    def config(self) -> RunConfig:
        """Its resolved configuration, with a value for every setting of docs/configuration.md.

        Raises:
            ConfigError: The files of the run are missing, or another version wrote them.
        """
        return config_of(self.directory)

    def status(self) -> RunStatus:
        """Return its present state, its processes and its newest metrics.

        The supervisor answers if it is alive; otherwise the run's files are read.
        """
        return status_of(self.directory)

    def steps(self) -> Iterator[dict[str, float]]:
        """Yield the metrics of each step, those written so far and new ones, until the run exits.

        Each row maps names of docs/metrics.md, with their units, to numbers; `step` counts learner
        steps from 1, and 0 is the first evaluation. A metric that a step does not report is absent.
        A step whose training is repeated after a crash is yielded again.

        Raises:
            RunFailed: The run failed or was killed; the message starts with the cause.
        """
        reader = RowReader(self.directory)
        has_ended = False
        while not has_ended:
            # Checked before reading, so that the last rows of a finished run are yielded.
            has_ended = self._ends_within(_POLL_S)
            yield from reader.new()
        self._raise_if_failed()

    def follow(self, on_step: Callable[[Run, dict[str, float]], object]) -> RunStatus:
        """Call a function after each step, until the run exits, and return its last state.

        Args:
            on_step: Receives this run and the metrics of the step, as `steps` yields them.
                `run.rollouts(step=metrics["step"])` has the samples of the step, and `run.scale`
                changes the run. False as its result stops the run.

        Raises:
            RunFailed: The run failed or was killed; the message starts with the cause. An error of
                the function is raised too, and the run continues.
        """
        for metrics in self.steps():
            if on_step(self, metrics) is False:
                return self.stop()
        return self.status()

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run exits and return its last state.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Raises:
            RunFailed: The run failed or was killed; the message starts with the cause.
            DeadlineExceeded: The run is still running after `timeout_s`. It continues.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ends_within(_POLL_S):
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"run {self.name} has not ended after {timeout_s:g} s")
        return self._raise_if_failed()

    def scale(self, **counts: int) -> list[PoolCount]:
        """Set the number of processes of pools, as in `scale(generators=2, verifiers=1)`.

        Args:
            **counts: The wanted number of each pool; other pools keep theirs. For a pool with a
                dot in its name write `scale(**{"generators.big": 1})`.

        Returns:
            The present numbers of every pool, immediately: new processes are still starting.

        Raises:
            ConfigError: The run is not running, a pool does not exist, or the run refuses the
            number.
        """
        if living_pid(self.directory) is None:
            raise ConfigError(f"{ended(self.status())}; async-rl resume {self.name} continues it")
        return ask_scale(self.directory, counts)

    def stop(self, *, now: bool = False) -> RunStatus:
        """Let the run finish its step and save, wait for its end, and return its last state.

        Does nothing if the run has already exited.

        Args:
            now: End without finishing the step in progress.

        Raises:
            DeadlineExceeded: The run is still running 60 s after its own limit, a third of
                `timeouts.start_s`.
        """
        pid = living_pid(self.directory)
        if pid is not None:
            ask_stop(self.directory, pid, is_graceful=not now)
            timeout_s = self.config.timeouts.stop_s + _STOP_GRACE_S
            if not wait_for_run(self.directory, pid, timeout_s=timeout_s):
                raise DeadlineExceeded(
                    f"run {self.name} (pid {pid}) has not ended after {timeout_s:.0f} s; end it"
                    f" with async-rl stop {self.name} --now"
                )
        return self.status()

    def session(self, *, rank: int | None = None, checkpoint: str | None = None) -> Session:
        """Start to train an adapter on the model of a service, `launch("serve")` or `async-rl
        serve`; waits until the service answers.

        Args:
            rank: Of the adapter; None for the largest that the service allows.
            checkpoint: What `Session.save` returned, to continue with its weights and its
                optimizer; its rank then holds.

        Raises:
            ConfigError: The run is no service.
            RunFailed: The service is not running.
            DataError: The service refuses the rank or the checkpoint.
        """
        # The protobuf messages of the service are an extra of the package.
        from async_rl.launchers.api.session import Session

        adapter = self.config.model.adapter
        if not self.config.agent.is_service:
            raise ConfigError(f'run {self.name} is not a service; start one with launch("serve")')
        return Session(
            self.directory, rank=rank or (adapter.rank if adapter else 0), checkpoint=checkpoint
        )

    def rollouts(
        self, *, step: int | None = None, failed: bool = False, num_groups: int = MOST_GROUPS
    ) -> list[Sample]:
        """Return stored responses, the newest groups first.

        Args:
            step: Return the groups that this step trained; None for groups of all steps.
            failed: Return only the responses that did not pass all tests.
            num_groups: Read at most this number of groups, the newest ones.

        Raises:
            ConfigError: The store or the model's tokenizer is missing, or nothing of the step is
                stored any more; the message names the steps that are.
        """
        return samples(self.directory, step=step, failed=failed, most=num_groups)

    def certify(self) -> Certificate:
        """Return what is known about its weights, prompts, selection, seeds, origin and faults, as
        statements with a verdict and their evidence; docs/certificate.md explains them.

        Raises:
            ConfigError: The files of the run are missing, or another version wrote them.
        """
        return certify(self.directory)

    def metrics(self) -> dict[str, DoubleArray]:
        """Return the metrics by name, float64 [rows] each, one row per learner step so far.

        `step` counts learner steps (0 is the first evaluation), `time_s` is seconds since the start
        of the run, and docs/metrics.md has the unit of every other name. A value is NaN where the
        step did not report the metric.
        """
        curves = Curves(self.directory)
        curves.refresh()
        return curves.columns()

    def _ends_within(self, seconds: float) -> bool:
        pid = living_pid(self.directory)
        if pid is not None:
            return wait_for_run(self.directory, pid, timeout_s=seconds)
        if self.status().is_running:  # a job that has not started has no process to wait for
            time.sleep(seconds)
            return False
        return True

    def _raise_if_failed(self) -> RunStatus:
        status = self.status()
        if status.state in (RunState.FAILED, RunState.KILLED):
            # Only a supervisor that ended in order has written a cause.
            cause = status.cause or f"{self.directory / starting.OUTPUT_FILE} may have the reason"
            raise RunFailed(
                f"run {self.name} {status.state} at step {status.step}: {cause}; see async-rl logs"
                f" {self.name}, or continue it with async-rl resume"
            )
        return status


@owner_only()
def resume(run: Run | str | Path, overrides: Overrides = ()) -> Run:
    """Continue a finished run from its last checkpoint, in the background, and return it.

    Args:
        run: The run, or its directory.
        overrides: Settings to change from here on, as for `launch`.

    Raises:
        ConfigError: The run is running, or its history does not allow a change; the message has
            one line per problem. Nothing was started or written.
    """
    from async_rl.composition.overrides import as_words
    from async_rl.launchers.api import resuming

    ended_run = open_run(run.directory if isinstance(run, Run) else run)
    run_dir = ended_run.directory
    # Before anything is read: of two that resume at the same time, one must see the changes of the
    # other.
    with owning(run_dir):
        config, _ = resuming.prepare(run_dir, as_words(overrides))
    # The supervisor takes the lock itself. Until then the mark that `prepare` left for this process
    # makes other attempts to resume fail.
    starting.start(config, run_dir)
    return ended_run


def open_run(directory: str | Path) -> Run:
    """Return the run in this directory, live or finished.

    Raises:
        ConfigError: The directory has no run; the message names similar ones.
    """
    path = Path(directory).expanduser().absolute()
    return Run(find_run(str(path), path.parent))


def ended(status: RunStatus) -> str:
    """Describe a finished run in one line."""
    outcomes = {
        RunState.KILLED: "was killed",
        RunState.QUEUED: "its job has not started yet: squeue",
    }
    cause = f": {status.cause}" if status.cause else ""
    outcome = outcomes.get(status.state, status.state.value)
    return (
        f"run {status.run_name} is not running ({outcome}); last step {status.step} of"
        f" {status.num_steps}{cause}"
    )
