"""Watches a running child: says when it ended, or which limit it went over.

CPU time decides.  Against programs that wait for ever, sleeping is limited too: time in which no
task of the child ran, wanted to run or waited for a disk, and in which this process was itself
scheduled.  So a crowded or stalled machine makes no program late. Used by `zygote.py`.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence

from .protocol import Ending, Request

_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_TICK_S = 0.02
_IDLE_SHARE = 0.01
_BLIND_FACTOR = 3
"""Without a readable /proc, whoever used no CPU time may have been kept waiting: its sleep counts
for a third.
"""


def open_proc() -> int:
    """A descriptor of /proc for `watch`, which no child keeps; -1 where there is none."""
    try:
        return os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def watch(
    request: Request, pids: Sequence[int], process: int, result: int, poller: select.poll, proc: int
) -> Ending:
    """Wait for the end of the child behind the descriptor `process`, or of a limit on all `pids`.

    A run counts as done when the result file grows.
    """
    if ready := poller.poll(_TICK_S * 1000):
        return _ending(ready, process)
    clocks = [(~pid << 3) | 2 for pid in pids]
    size, run_cpu, last_cpu, run_asleep = 0, 0.0, 0.0, 0.0
    while True:
        before = time.monotonic()
        if ready := poller.poll(_TICK_S * 1000):
            return _ending(ready, process)
        elapsed = min(time.monotonic() - before, 2 * _TICK_S)
        try:
            cpu = sum(map(time.clock_gettime, clocks))
        except OSError:
            continue  # it has just ended; the next poll says so
        if (now := os.fstat(result).st_size) != size:
            size, run_cpu, run_asleep = now, last_cpu, 0.0
        if cpu - last_cpu < _IDLE_SHARE * elapsed:
            run_asleep += elapsed * _share_asleep(proc, pids)
        last_cpu = cpu
        if cpu - run_cpu > request.cpu_s or cpu > request.cpu_s * request.num_runs:
            return Ending.CPU
        if run_asleep > request.sleep_s:
            return Ending.WALL


def _ending(ready: Sequence[tuple[int, int]], process: int) -> Ending:
    return Ending.EXITED if any(fd == process for fd, _ in ready) else Ending.CANCELLED


def _share_asleep(proc: int, pids: Sequence[int]) -> float:
    """1 if every task of these processes sleeps because it wants to, 0 if one does not, a third if
    that cannot be seen.
    """
    try:
        return float(all(state in b"SZX" for pid in pids for state in _states(proc, pid)))
    except OSError:
        return 1 / _BLIND_FACTOR


def _states(proc: int, pid: int) -> list[bytes]:
    """State letters of the tasks of a process, whose number differs in the host's /proc: its
    descriptor knows it there.
    """
    process = os.pidfd_open(pid)
    try:
        number = _read(proc, f"self/fdinfo/{process}")
    finally:
        os.close(process)
    found = _PID.search(number)
    if found is None:
        raise ProcessLookupError(f"process {pid} has no number in /proc")
    directory = os.open(f"{int(found[1])}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        return [
            _read(directory, f"{task}/stat").rpartition(b") ")[2][:1]
            for task in os.listdir(directory)
        ]
    finally:
        os.close(directory)


def _read(directory: int, path: str) -> bytes:
    file = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
