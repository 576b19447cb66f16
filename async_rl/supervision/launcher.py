"""What the supervisor knows of a launcher: it starts a process spec and gives a handle to wait on,
end, or read.

Implemented by `launchers/backends/local.py` (child processes), `launchers/backends/ray.py` (actors)
and `launchers/backends/slurm.py` (job steps).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from async_rl.planning.topology import ProcessSpec


class ProcessHandle(Protocol):
    """One started process."""

    @property
    def pid(self) -> int:
        """Process id on the machine where it runs; 0 until it has a place."""

    @property
    def waits_for(self) -> str:
        """What it takes of the cluster, for people, while it has no place yet; empty where it runs
        at once.
        """

    @property
    def why(self) -> str:
        """Why it ended, where the launcher knows more than the exit code tells (its machine is
        gone); else empty.
        """

    async def placed(self) -> None:
        """Returns once it runs somewhere, or will not: until then it waits for resources, for as
        long as that takes.
        """

    async def wait(self) -> int:
        """The exit code once the process and all it left behind have ended; -N if signal N ended
        it.
        """

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). Harmless if it has ended."""

    def kill(self) -> None:
        """End it and its children now (SIGKILL). Harmless if it has ended."""


class Launcher(Protocol):
    """Starts processes."""

    async def open(self) -> str:
        """Gets ready. The address of this machine by which the machines where it starts processes
        reach it.
        """

    async def close(self) -> None:
        """Lets go of everything; nothing that it started runs on."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process of the run, or ask for a place for it. Raises InfrastructureError if
        that cannot be done.
        """

    def output_of(self, name: str) -> Path:
        """Where the process's own output goes."""
