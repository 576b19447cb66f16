"""Starts every process of a run as a child of the supervisor on this machine.

Each child leads its own session, so that Ctrl-C in the terminal reaches only the supervisor, and
one signal to the group stops everything the child has started. The kernel kills a child when its
parent dies (`runtime/main.py`), so no exit path leaves orphans.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from async_rl.core.errors import InfrastructureError
from async_rl.core.machine import chosen_gpus
from async_rl.launchers.backends.backend import Backend
from async_rl.observability.logs import output_path
from async_rl.planning.topology import ProcessSpec
from async_rl.runtime.start import Start
from async_rl.supervision.launcher import ProcessHandle
from async_rl.wire.addresses import LOOPBACK


def child_command(
    spec: ProcessSpec, run_dir: Path, *, parent_pid: int, announces: bool = False
) -> list[str]:
    """Return the command of the process; parent_pid and announces as in `Start`."""
    start = Start(spec=spec, run_dir=str(run_dir), parent_pid=parent_pid, announces=announces)
    return [sys.executable, "-m", "async_rl.runtime.main", msgspec.json.encode(start).decode()]


def child_env(spec: ProcessSpec, own: Mapping[str, str]) -> dict[str, str]:
    """Return `own` with the variables of the spec; its n-th GPU is the n-th that `own` allows."""
    env = {**own, **spec.env}
    devices = spec.env.get("CUDA_VISIBLE_DEVICES")
    if devices:
        names = chosen_gpus(own)
        if names is not None:
            chosen = (names[int(index)] for index in devices.split(","))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return env


class LocalProcess(ProcessHandle):
    """A child process and its session."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int:
        """Return the exit code, after killing everything left in the child's session."""
        # Engines and verifiers start further processes, which outlive a crash of their parent.
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the child alone, which stops its children in order."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the child and everything it started."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        # The group may be gone, or its number belong to another user by now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class LocalLauncher:
    """Starts `async_rl.runtime.main` for each spec, its output in `<run>/logs/<name>.out`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.absolute()

    async def open(self) -> str:
        """Return loopback: all processes are on this machine."""
        return LOOPBACK

    async def close(self) -> None:
        """Do nothing: children end with their parent."""

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start the process of `spec`. Raises InfrastructureError if the system refuses."""
        output = output_path(self._run_dir, spec.name)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            # Appended: the output of earlier lives of the process stays.
            with output.open("ab") as sink:
                process = await asyncio.create_subprocess_exec(
                    *child_command(spec, self._run_dir, parent_pid=os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                    env=child_env(spec, os.environ),
                )
        except OSError as error:
            raise InfrastructureError(f"{spec.name} could not be started: {error}") from error
        return LocalProcess(process)


BACKEND = Backend(make=lambda run_dir, config: LocalLauncher(run_dir))
