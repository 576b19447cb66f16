"""Runs in Python: start one, follow its steps, change it, stop it, and read it after its end.

A run is a background process with its own directory, exactly as `async-rl launch` makes it, so
`async-rl status`, `logs` and `stop` see it too. It does not end with the Python process that
started it; `open_run` continues with it from another one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError, DeadlineExceeded, RunFailed
from async_rl.core.machine import this_machine
from async_rl.core.types import PoolCount
from async_rl.launchers.api import starting
from async_rl.launchers.api.metrics import Metrics, RowReader
from async_rl.launchers.api.samples import MOST_GROUPS, Sample, samples
from async_rl.launchers.api.status import RunState, RunStatus, status_of
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import (
    ask_scale,
    ask_stop,
    living_pid,
    wait_for_run,
)

Overrides = Mapping[str, object] | Sequence[str]
"""Settings that differ from conf/: {"num_steps": 20, "learner": {"ranks": 2}}, with dotted or
nested names, or ["num_steps=20", "learner.ranks=2"] as on the command line.
"""

_POLL_S = 0.3  # files change without an event that every filesystem delivers
_STOP_GRACE_S = 60.0
"""Added to the run's own stop timeout for the last evaluation and the end of the processes."""


class Run:
    """One run, live or ended. directory: its files. Every method can be called in a notebook's
    cell, where an event loop is running.
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
        """Its resolved configuration. Raises ConfigError if another version wrote it."""
        return runs.config_of(self.directory)

    def status(self) -> RunStatus:
        """Return its present state, its processes and its newest metrics."""
        return status_of(self.directory)

    def steps(self) -> Iterator[dict[str, float]]:
        """Yield the metrics of each step, those written so far and new ones, until the run ends.

        A step whose training is repeated after a crash is yielded again. Raises RunFailed with the
        cause if the run failed or was killed.
        """
        reader = RowReader(self.directory)
        has_ended = False
        while not has_ended:
            # Asked before reading, so that the last rows of an ended run are yielded.
            has_ended = self._ends_within(_POLL_S)
            yield from reader.new()
        self._raise_if_failed()

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has ended and return its last state.

        Raises RunFailed with the cause if the run failed or was killed, DeadlineExceeded after
        `timeout_s`.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ends_within(_POLL_S):
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"run {self.name} has not ended after {timeout_s:g} s")
        return self._raise_if_failed()

    def scale(self, *, is_forced: bool = False, **counts: int) -> list[PoolCount]:
        """Set the number of processes of pools, as in scale(generators=2, verifiers=1).

        A pool with a dot in its name: scale(**{"generators.big": 1}). Returns immediately with the
        present numbers of every pool. is_forced: even if this machine
        may have too little memory. Raises ConfigError if the run has ended or refuses.
        """
        if living_pid(self.directory) is None:
            raise ConfigError(f"{ended(self.status())}; async-rl resume {self.name} continues it")
        return ask_scale(self.directory, counts, is_forced=is_forced)

    def stop(self, *, now: bool = False) -> RunStatus:
        """Let the run finish its step and save, wait for its end, and return its last state.

        now: do not finish the step in progress. Raises DeadlineExceeded if it does not end in time.
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

    def rollouts(
        self, *, step: int | None = None, failed: bool = False, num_groups: int = MOST_GROUPS
    ) -> list[Sample]:
        """Return stored responses, the newest groups first.

        step: of the groups that this step trained, otherwise of the newest `num_groups` groups.
        failed: only those that did not pass all tests.
        """
        return samples(self.directory, step=step, failed=failed, most=num_groups)

    def metrics(self) -> Metrics:
        """Return the metrics of all steps so far, as columns."""
        return Metrics(RowReader(self.directory).new())

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
        if status.state is RunState.FAILED:
            raise RunFailed(f"run {self.name} failed at step {status.step}: {status.cause}")
        if status.state is RunState.KILLED:
            raise RunFailed(
                f"run {self.name} was killed at step {status.step}; see async-rl logs {self.name}"
                f" and {self.directory / starting.OUTPUT_FILE}; async-rl resume continues it"
            )
        return status


def launch(conf: str, overrides: Overrides = ()) -> Run:
    """Start a run in the background and return it.

    conf: a name from conf/ or the path of a yaml file. Raises ConfigError, with one line per
    problem and before anything starts, if the settings do not fit each other or this machine.
    """
    from async_rl.launchers.configuration.overrides import as_words

    config, _ = starting.checked_config(conf, as_words(overrides), this_machine())
    run_dir = starting.make_run_dir(config)
    starting.start(config, run_dir)
    return Run(run_dir)


def open_run(directory: str | Path) -> Run:
    """Return the run in this directory, live or ended. Raises ConfigError if there is none."""
    path = Path(directory).expanduser().absolute()
    return Run(runs.find(str(path), path.parent))


def ended(status: RunStatus) -> str:
    """Describe a run that has ended, in one line."""
    outcomes = {
        RunState.KILLED: "was killed",
        RunState.QUEUED: runs.QUEUED,
    }
    cause = f": {status.cause}" if status.cause else ""
    outcome = outcomes.get(status.state, status.state.value)
    return (
        f"run {status.run_name} is not running ({outcome}); last step {status.step} of"
        f" {status.num_steps}{cause}"
    )
