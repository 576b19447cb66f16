"""Calls of the supervisor by people's commands, and by a process that reports its failure."""

import contextlib
import platform
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from async_rl.core.errors import Unavailable
from async_rl.runtime.context import Control, load_control
from async_rl.wire.keys import load_keys
from async_rl.wire.rpc import RpcClient


def require_running(run_dir: Path) -> Control:
    """Return the address of the run's supervisor. Raises Unavailable if its process has exited."""
    control = load_control(run_dir)
    # Only this machine's pids can be checked; elsewhere the call runs into its deadline.
    if control.machine == platform.node() and not _is_alive(control.pid):
        raise Unavailable(
            f"{run_dir.name} is not running: its supervisor (pid {control.pid}) has exited"
        )
    return control


def _is_alive(pid: int) -> bool:
    # A zombie has exited; only its parent has not asked for its exit code yet.
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.asynccontextmanager
async def connect_control(run_dir: Path) -> AsyncIterator[RpcClient]:
    """Open a client of the run's supervisor. Raises Unavailable if its process has exited."""
    control = require_running(run_dir)
    control.check_messages(run_dir.name)
    async with RpcClient(control.address, load_keys(run_dir / "keys")) as client:
        yield client
