"""The interface of a launcher: it starts a process spec and returns a handle to wait for its end.

Implemented by `launchers/backends/local.py` (child processes), `launchers/backends/ray_actors.py`
(actors) and `launchers/backends/slurm.py` (job steps).
"""

from typing import Protocol

from async_rl.planning.topology import ProcessSpec


class ProcessHandle(Protocol):
    """One started process.

    pid: on the machine where it runs; 0 until it has its resources. waits_for: the resources of the
    cluster that it waits for; empty where it runs immediately. why: the reason for its end, if the
    launcher knows more than the exit code (its machine failed).
    """

    pid: int
    waits_for: str = ""
    why: str = ""

    async def placed(self) -> None:
        """Wait without limit until the process has its resources or has exited."""
        return

    async def wait(self) -> int:
        """Return the exit code once the process and all its children have exited; -N after signal
        N.
        """

    def terminate(self) -> None:
        """Send SIGTERM. Harmless if the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL to the process and its children. Harmless if it has exited."""


class Launcher(Protocol):
    """Starts processes."""

    async def open(self) -> str:
        """Prepare to start processes; return the address at which they reach this machine."""

    async def close(self) -> None:
        """Release everything; no process that it started keeps running."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start one process, or request its resources. Raises InfrastructureError on failure."""
