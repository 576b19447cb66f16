"""The interface of a launcher's module: `launchers/backends/<kind>.py` has a `BACKEND`.

To add a launcher, write that module, add its section to `async_rl/config/launchers.py` with what
it can do, and its values to `conf/variants.yaml`. Nothing else names a launcher.
"""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.core.frozen import frozen
from async_rl.supervision.launcher import Launcher, ProcessHandle


@frozen
class Job:
    """The queue of a launcher that runs the supervisor itself in a job.

    script: text of the job for a run's directory; submit: hands it over and returns its number,
    raises ConfigError if it is refused; is_inside: whether this process runs in such a job already.
    """

    script: Callable[[RunConfig, Path], str]
    submit: Callable[[RunConfig, Path], str]
    is_inside: Callable[[], bool]


@frozen
class Backend:
    """make: the launcher of a run's directory; problems: why this machine cannot use it, one line
    each; job: None if the supervisor runs where the run is launched.
    """

    make: Callable[[Path, RunConfig], Launcher]
    problems: Callable[[RunConfig], Iterator[str]] = lambda config: iter(())
    job: Job | None = None


def backend_of(config: RunConfig) -> Backend:
    """Return the backend of the launcher that the configuration names."""
    # By name: a table here would be one more file to change for each launcher.
    module = importlib.import_module(f"{__package__}.{config.launcher.kind}")
    backend: Backend = vars(module)["BACKEND"]
    return backend


def job_to_submit(config: RunConfig) -> Job | None:
    """Return the job that must be submitted, which then supervises the run; None if this process
    supervises it.
    """
    job = backend_of(config).job
    return None if job is None or job.is_inside() else job


class PlacedProcess(ProcessHandle):
    """A process that a cluster places: `pid` is 0 until it has its resources."""

    def __init__(self, waits_for: str) -> None:
        self.pid = 0
        self.waits_for = waits_for
        self._is_placed = asyncio.Event()
        self._killing: set[asyncio.Task[None]] = set()

    async def placed(self) -> None:
        """Wait until the process runs on a node, or never will."""
        await self._is_placed.wait()
