"""How the command line reaches a run that is already going: its control socket, or its process
where that does not answer yet.

Invariants: a process is only signalled if it is the one that launched the run (same id and same
start time). Called by the command line's `launch` (leaves the mark), `status`, `scale` and `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import select
import signal
import time
from pathlib import Path

import msgspec
import psutil

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import PoolCount
from async_rl.protocol.base import Message
from async_rl.protocol.control import GetStatus, Pools, Scale, StatusReply, StopRun

MARK = "launched.json"
_CALL_S = 10.0
_LOOK_S = 1.0


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which process launched the run, on which machine."""

    machine: str
    pid: int
    created_s: float


def leave_mark(run_dir: Path) -> None:
    """Write down that this process is the run's."""
    mark = Mark(machine=platform.node(), pid=os.getpid(), created_s=psutil.Process().create_time())
    (run_dir / MARK).write_bytes(msgspec.json.encode(mark))


def _load_mark(run_dir: Path) -> Mark:
    return msgspec.json.decode((run_dir / MARK).read_bytes(), type=Mark)


def _is_elsewhere(run_dir: Path) -> bool:
    return _load_mark(run_dir).machine != platform.node()


def living_pid(run_dir: Path) -> int | None:
    """The process id of the run's supervisor if it lives, else None. On another machine it lives as
    long as it answers.
    """
    try:
        mark = _load_mark(run_dir)
        if mark.machine != platform.node():
            return mark.pid if ask_status(run_dir) is not None else None
        process = psutil.Process(mark.pid)
        is_same = (
            abs(process.create_time() - mark.created_s) < 1
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except (OSError, msgspec.DecodeError, psutil.Error):
        return None
    return mark.pid if is_same else None


def ask_status(run_dir: Path) -> StatusReply | None:
    """The run's own account of itself; None if it does not answer (yet, or any more)."""
    try:
        reply = asyncio.run(_call(run_dir, GetStatus()))
    except InfrastructureError:
        return None
    assert isinstance(reply, StatusReply)
    return reply


def ask_scale(run_dir: Path, wanted: dict[str, int], *, is_forced: bool) -> list[PoolCount]:
    """Tell the run how many processes of each pool it should have. Raises Unavailable if it does
    not answer, ConfigError if it refuses.
    """
    reply = asyncio.run(_call(run_dir, Scale(wanted=wanted, is_forced=is_forced)))
    assert isinstance(reply, Pools)
    return reply.pools


def ask_stop(run_dir: Path, pid: int, *, is_graceful: bool) -> None:
    """Tell the run to stop: over its control socket, by signal while it has none (it prepares the
    model).
    """
    try:
        asyncio.run(_call(run_dir, StopRun(is_graceful=is_graceful)))
    except InfrastructureError:
        if _is_elsewhere(run_dir):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            if not is_graceful:
                os.kill(pid, signal.SIGINT)


def wait_for_run(run_dir: Path, pid: int, *, timeout_s: float) -> bool:
    """Block until the run's supervisor has ended, wherever it is; False if it has not by then."""
    if not _is_elsewhere(run_dir):
        return wait_for_end(pid, timeout_s=timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while living_pid(run_dir) is not None and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)  # no word of an end comes from another machine
    return living_pid(run_dir) is None


def wait_for_end(pid: int, *, timeout_s: float) -> bool:
    """Block until the process has ended; False if it has not by then."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


async def _call(run_dir: Path, request: Message) -> Message:
    from async_rl.runtime.context import connect_control  # sockets: not for --help and --dry-run

    async with connect_control(run_dir) as supervisor:
        reply: Message = await supervisor.call(request, timeout_s=_CALL_S)
        return reply
