"""Access to a live run: its control socket, or its process while that does not answer yet.

Invariants
- A process is only signalled if it launched the run (same id and same start time),
  which `launched.json` records.
- One process at a time launches or resumes a run: it holds the lock of the run's directory.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import platform
import select
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.protocol.base import Message
from async_rl.protocol.supervisor import GetStatus, PoolCount, Scale, StatusReply, StopRun

MARK = "launched.json"
# The supervisor answers from memory; longer means that it has exited or hangs.
_CALL_S = 10.0
_POLL_S = 1.0
_LOCK = "lock"
_START_TICKS = 19  # proc(5): starttime is field 22, and the state, field 3, follows the name


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that launched the run, and its machine.

    start_ticks: its start in ticks of the kernel since boot. A time of day would change when the
    wall clock is set, and a living run would look dead.
    """

    machine: str
    pid: int
    start_ticks: int


def leave_mark(run_dir: Path, pid: int | None = None) -> None:
    """Record the process that supervises the run: this one, or another one of this machine."""
    pid = os.getpid() if pid is None else pid
    mark = Mark(machine=platform.node(), pid=pid, start_ticks=start_ticks(pid))
    # A reader that sees half a mark takes a living run for a killed one. The process id is in the
    # name because the process that starts a supervisor and the supervisor may both write now.
    partial = run_dir / f"{MARK}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(mark))
    partial.replace(run_dir / MARK)


@contextlib.contextmanager
def owning(run_dir: Path) -> Iterator[None]:
    """Be the only process that launches or resumes the run, until the block or the process exits.

    Raises ConfigError if another process does.
    """
    with (run_dir / _LOCK).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run {run_dir.name} is running, or is being resumed by another process; see"
                f" async-rl status {run_dir.name}, or end it with async-rl stop {run_dir.name}"
            ) from error
        except OSError as error:
            # Some network filesystems have no locks; the mark is checked there as well.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
        yield


def start_ticks(pid: int) -> int:
    """Return the kernel's start time of a process. Raises OSError if there is none."""
    # The name, in parentheses, may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[_START_TICKS])


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
        is_same = start_ticks(mark.pid) == mark.start_ticks
        is_alive = is_same and psutil.Process(mark.pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, msgspec.DecodeError, psutil.Error):
        return None
    return mark.pid if is_alive else None


def ask_status(run_dir: Path, *, timeout_s: float = _CALL_S) -> StatusReply | None:
    """Return the run's status, or None if it does not answer (not yet, or no longer)."""
    try:
        reply = _call(run_dir, GetStatus(), timeout_s)
    except InfrastructureError:
        return None
    assert isinstance(reply, StatusReply)
    return reply


def ask_scale(run_dir: Path, wanted: dict[str, int]) -> list[PoolCount]:
    """Ask the run for a number of processes per pool. Raises Unavailable if it does not answer,
    ConfigError if it refuses.
    """
    _call(run_dir, Scale(wanted=wanted))
    status = ask_status(run_dir)
    return status.pools if status else []


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
    """Wait until the run's supervisor has exited; return False after `timeout_s`."""
    if not _is_elsewhere(_load_mark(run_dir)):
        return wait_for_end(pid, timeout_s=timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while living_pid(run_dir) is not None:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)  # no event reports the end of a process on another machine
    return True


def wait_for_end(pid: int, *, timeout_s: float) -> bool:
    """Wait until the process has exited; return False after `timeout_s`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def _call(run_dir: Path, request: Message, timeout_s: float = _CALL_S) -> Message:
    # In a thread: a notebook's cells run inside an event loop, where asyncio.run is refused.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _send(run_dir, request, timeout_s)).result()


async def _send(run_dir: Path, request: Message, timeout_s: float) -> Message:
    from async_rl.runtime.context import connect_control  # imports zmq, which --help does not need

    async with connect_control(run_dir) as supervisor:
        reply: Message = await supervisor.call(request, timeout_s=timeout_s)
        return reply
