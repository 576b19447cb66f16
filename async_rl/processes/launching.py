"""What the supervisor knows of a launcher: it starts a process spec and gives a handle to wait on, end, or read.

Implemented by `launchers/local.py` (child processes); other places (Ray, Slurm) plug in here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from async_rl.topology import ProcessSpec


class ProcessHandle(Protocol):
    """One started process."""

    @property
    def pid(self) -> int:
        """Process id on the machine where it runs."""

    async def wait(self) -> int:
        """The exit code once the process and all it left behind have ended; -N if signal N ended it."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM). Harmless if it has ended."""

    def kill(self) -> None:
        """End it and its children now (SIGKILL). Harmless if it has ended."""


class Launcher(Protocol):
    """Starts processes."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process of the run. Raises InfrastructureError if that cannot be done."""

    def output_of(self, name: str) -> Path:
        """Where the process's own output goes."""
