"""Access to a live run: its control socket, or its process while that does not answer yet.

Invariant: a process is only signalled if it is the one that launched the run (same id and same
start time), which `launched.json` records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import select
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import PoolCount
from async_rl.protocol.base import Message
from async_rl.protocol.control import GetStatus, Pools, Scale, StatusReply, StopRun

MARK = "launched.json"
_CALL_S = 10.0
_POLL_S = 1.0
_SAME_START_S = 1.0  # the kernel counts start times in ticks, psutil converts them


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that launched the run, and its machine."""

    machine: str
    pid: int
    created_s: float


def leave_mark(run_dir: Path, pid: int | None = None) -> None:
    """Record the process that supervises the run: this one, or another one of this machine."""
    process = psutil.Process(pid)
    mark = Mark(machine=platform.node(), pid=process.pid, created_s=process.create_time())
    (run_dir / MARK).write_bytes(msgspec.json.encode(mark))


def _load_mark(run_dir: Path) -> Mark:
    return msgspec.json.decode((run_dir / MARK).read_bytes(), type=Mark)


def _is_elsewhere(mark: Mark) -> bool:
    return mark.machine != platform.node()


def living_pid(run_dir: Path) -> int | None:
    """Return the process id of the run's supervisor if it is alive. On another machine it counts as
    alive while it answers.
    """
    try:
        mark = _load_mark(run_dir)
        if _is_elsewhere(mark):
            return mark.pid if ask_status(run_dir) is not None else None
        process = psutil.Process(mark.pid)
        is_same = abs(process.create_time() - mark.created_s) < _SAME_START_S
        is_alive = is_same and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, msgspec.DecodeError, psutil.Error):
        return None
    return mark.pid if is_alive else None


def ask_status(run_dir: Path) -> StatusReply | None:
    """Return the run's status, or None if it does not answer (not yet, or no longer)."""
    try:
        reply = _call(run_dir, GetStatus())
    except InfrastructureError:
        return None
    assert isinstance(reply, StatusReply)
    return reply


def ask_scale(run_dir: Path, wanted: dict[str, int], *, is_forced: bool) -> list[PoolCount]:
    """Ask the run for a number of processes per pool. Raises Unavailable if it does not answer,
    ConfigError if it refuses.
    """
    reply = _call(run_dir, Scale(wanted=wanted, is_forced=is_forced))
    assert isinstance(reply, Pools)
    return reply.pools


def ask_stop(run_dir: Path, pid: int, *, is_graceful: bool) -> None:
    """Ask the run to stop: over its control socket, or by signal while it has none, which is the
    case while it prepares the model.
    """
    try:
        _call(run_dir, StopRun(is_graceful=is_graceful))
    except InfrastructureError:
        if _is_elsewhere(_load_mark(run_dir)):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            if not is_graceful:
                os.kill(pid, signal.SIGINT)


def wait_for_run(run_dir: Path, pid: int, *, timeout_s: float) -> bool:
    """Wait until the run's supervisor has ended; return False after `timeout_s`."""
    if not _is_elsewhere(_load_mark(run_dir)):
        return wait_for_end(pid, timeout_s=timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while living_pid(run_dir) is not None and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # no event reports the end of a process on another machine
    return living_pid(run_dir) is None


def wait_for_end(pid: int, *, timeout_s: float) -> bool:
    """Wait until the process has ended; return False after `timeout_s`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def _call(run_dir: Path, request: Message) -> Message:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_send(run_dir, request))
    # A notebook's cells run inside an event loop, where asyncio.run is refused.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _send(run_dir, request)).result()


async def _send(run_dir: Path, request: Message) -> Message:
    from async_rl.runtime.context import connect_control  # imports zmq, which --help does not need

    async with connect_control(run_dir) as supervisor:
        reply: Message = await supervisor.call(request, timeout_s=_CALL_S)
        return reply
