"""Watches a running child and reports how it ended or which limit it exceeded.

CPU time decides. Sleeping is limited too, so that a program that waits forever ends. Only time
counts as sleep in which no task of the child ran, wanted to run or waited for a disk, and in which
this process itself was scheduled; a crowded or stalled machine therefore makes no program late.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence

from .protocol import Ending, JobSpec

_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_TICK_S = 0.02
_IDLE_SHARE = 0.01
_BLIND_FACTOR = 3
"""Without a readable /proc, a child that used no CPU time may have waited for the machine: a third
of its idle time counts as sleep.
"""
_CLOCK_OF_PROCESS = 2
"""Low bits of the kernel's clock id for the CPU time of a process (CPUCLOCK_SCHED)."""


def open_proc() -> int:
    """A descriptor of /proc for `watch`, closed in every child; -1 if there is no /proc."""
    try:
        return os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1


def watch(
    spec: JobSpec, pids: Sequence[int], process: int, result: int, poller: select.poll, proc: int
) -> Ending:
    """Wait for the end of the child behind the descriptor `process`, or of a limit on all `pids`.

    A run counts as done when the result file grows.
    """
    # Most programs end within the first tick: nothing is measured for them.
    ready = poller.poll(_TICK_S * 1000)
    clocks = [(~pid << 3) | _CLOCK_OF_PROCESS for pid in pids]
    size, run_cpu, last_cpu, run_asleep = 0, 0.0, 0.0, 0.0
    while not ready:
        before = time.monotonic()
        ready = poller.poll(_TICK_S * 1000)
        if ready:
            break
        elapsed = min(time.monotonic() - before, 2 * _TICK_S)
        try:
            cpu = sum(map(time.clock_gettime, clocks))
        except OSError:
            continue  # a child has just ended; the next poll reports it
        new_size = os.fstat(result).st_size
        if new_size != size:
            size, run_cpu, run_asleep = new_size, last_cpu, 0.0
        if cpu - last_cpu < _IDLE_SHARE * elapsed:
            run_asleep += elapsed * _share_asleep(proc, pids)
        last_cpu = cpu
        if cpu - run_cpu > spec.cpu_s or cpu > spec.cpu_s * spec.num_runs:
            return Ending.CPU
        if run_asleep > spec.sleep_s:
            return Ending.WALL
    return Ending.EXITED if any(fd == process for fd, _ in ready) else Ending.CANCELLED


def _share_asleep(proc: int, pids: Sequence[int]) -> float:
    """1 if every task of these processes sleeps voluntarily, 0 if one does not.

    It is a third if the states cannot be read.
    """
    try:
        return float(all(state in b"SZX" for pid in pids for state in _states(proc, pid)))
    except OSError:
        return 1 / _BLIND_FACTOR


def _states(proc: int, pid: int) -> list[bytes]:
    """State letters of the tasks of a process.

    The process has another number in the host's /proc; the fdinfo of its descriptor contains it.
    """
    process = os.pidfd_open(pid)
    try:
        info = _read(proc, f"self/fdinfo/{process}")
    finally:
        os.close(process)
    number = _PID.search(info)
    if number is None:
        raise ProcessLookupError(f"process {pid} has no number in /proc")
    directory = os.open(f"{int(number[1])}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    try:
        stats = [_read(directory, f"{task}/stat") for task in os.listdir(directory)]
    finally:
        os.close(directory)
    return [stat.rpartition(b") ")[2][:1] for stat in stats]


def _read(directory: int, path: str) -> bytes:
    file = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
