"""Runs every process of a run as a child of the supervisor on this machine.

Each child leads its own session, so that Ctrl-C in the terminal reaches only the supervisor, and
one signal to the group ends whatever the child has started.  A child asks the kernel to be killed
when its parent dies (`runtime/main.py`), so no exit path leaves orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from async_rl.core.errors import InfrastructureError
from async_rl.core.machine import gpu_names
from async_rl.planning.topology import ProcessSpec
from async_rl.wire.addresses import LOOPBACK


def child_command(spec: ProcessSpec, run_dir: Path, *, parent_pid: int) -> list[str]:
    """The command of the process. parent_pid: whose end is its own; 0 = whoever starts it."""
    command = [sys.executable, "-m", "async_rl.runtime.main"]
    command += [
        "--name",
        spec.name,
        "--role",
        spec.role,
        "--rank",
        str(spec.rank),
        "--cores",
        ",".join(map(str, spec.cores)),
    ]
    return [*command, "--run-dir", str(run_dir), "--parent-pid", str(parent_pid)]


def child_env(spec: ProcessSpec, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process: `own`, and what the spec asks for, its n-th GPU being the
    n-th that `own` lets us use.
    """
    env = {**own, **spec.env}
    if asked := spec.env.get("CUDA_VISIBLE_DEVICES"):
        names = gpu_names(own)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[int(index)] for index in asked.split(","))
    return env


class LocalProcess:
    """A child process and its session."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.waits_for = ""
        self.why = ""

    async def placed(self) -> None:
        """It runs since it was made."""

    async def wait(self) -> int:
        """The exit code, after everything left in the child's session has been killed."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """SIGTERM to the child alone: it ends its own children in order."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the child and everything it started."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class LocalLauncher:
    """Starts `async_rl.runtime.main` for each spec, its output in `<run>/logs/<name>.out`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir.absolute()

    async def open(self) -> str:
        """Nothing to do; nobody else has to reach this machine."""
        return LOOPBACK

    async def close(self) -> None:
        """Nothing to do: children end with their parent."""

    def output_of(self, name: str) -> Path:
        """The file with what the process and its libraries print."""
        return self._run_dir / "logs" / f"{name}.out"

    async def start(self, spec: ProcessSpec) -> LocalProcess:
        """Start the process of `spec`. Raises InfrastructureError if the system refuses."""
        output = self.output_of(spec.name)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
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
