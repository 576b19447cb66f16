"""Watches a running child and reports how it ended or which limit it exceeded.

CPU time decides. Sleeping is limited too, so that a program that waits forever ends. Only time
counts as sleep in which no task of the child ran, waited for a core or waited for a disk, and in
which this process itself was scheduled; a crowded or stalled machine therefore makes no program
late. Invariants: limits hold for the whole job, and nothing that a program writes extends them.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence

from .protocol import Ending, JobSpec

_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_TICK_S, _TICK_MS = 0.02, 20
_SHARED_SHARE = 0.25
"""A run that takes this share of the limit after others in the same child exits there: it runs
again in a separate child, with the whole limit. Without this rule, a program that times out in its
second test would use the limit twice.
"""
_BLIND_FACTOR = 3
"""Without a readable /proc, a child that used no CPU time may have waited for the machine: a third
of its idle time counts as sleep.
"""
_FIRST_FRAMES = 4096
"""Bytes of the result file in which a second frame is looked for when watching starts."""
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
    ready = poller.poll(_TICK_MS) or _measured(spec, pids, result, poller, proc)
    if isinstance(ready, Ending):
        return ready
    return Ending.EXITED if any(fd == process for fd, _ in ready) else Ending.CANCELLED


def _measured(
    spec: JobSpec, pids: Sequence[int], result: int, poller: select.poll, proc: int
) -> list[tuple[int, int]] | Ending:
    """Wait for what the poller reports, or for the limit that is exceeded first."""
    clocks = [(~pid << 3) | _CLOCK_OF_PROCESS for pid in pids]
    last_cpu, asleep = 0.0, 0.0
    size, run_cpu = os.fstat(result).st_size, 0.0
    has_shared = spec.num_tests > 1 and os.pread(result, _FIRST_FRAMES, 0).count(b"\n") > 1
    tasks: dict[bytes, tuple[int, int]] = {}
    while True:
        before = time.monotonic()
        ready = poller.poll(_TICK_MS)
        if ready:
            return ready
        elapsed = min(time.monotonic() - before, 2 * _TICK_S)
        try:
            cpu = sum(map(time.clock_gettime, clocks))
        except OSError:
            continue  # a child has just ended; the next poll reports it
        try:
            asleep += _asleep(proc, pids, tasks, elapsed)
        except OSError:
            asleep += max(0.0, elapsed - (cpu - last_cpu)) / _BLIND_FACTOR
        last_cpu = cpu
        new_size = os.fstat(result).st_size
        if new_size != size:
            size, run_cpu, has_shared = new_size, cpu, spec.num_tests > 1
        if cpu > spec.cpu_s or (has_shared and cpu - run_cpu > _SHARED_SHARE * spec.cpu_s):
            return Ending.CPU
        if asleep > spec.sleep_s:
            return Ending.WALL


def _asleep(
    proc: int, pids: Sequence[int], tasks: dict[bytes, tuple[int, int]], elapsed: float
) -> float:
    """Seconds of the last `elapsed` in which no task of these processes ran or wanted a core.

    tasks: task -> nanoseconds that it ran, and waited for a core, until the last call; updated
    here. The kernel's counts are used, not samples of the state: a program that sleeps in short
    pieces may be awake at each sample.
    """
    busy_ns = 0
    for pid in pids:
        longest_wait = 0
        for task, state, ran, waited in _tasks(proc, pid):
            ran_before, waited_before = tasks.get(task, (0, 0))
            tasks[task] = ran, waited
            # A wait for a core is counted when it ends; a wait for a disk is not counted at all.
            if (ran, waited) == (ran_before, waited_before) and state not in b"SZX":
                return 0.0
            busy_ns += ran - ran_before
            # Not the sum: tasks that wait for each other would count as busy without running.
            longest_wait = max(longest_wait, waited - waited_before)
        busy_ns += longest_wait
    return max(0.0, elapsed - busy_ns / 1e9)


def _tasks(proc: int, pid: int) -> list[tuple[bytes, bytes, int, int]]:
    """(number, letter of the state, nanoseconds run and waited for a core) of each task.

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
        tasks = []
        for task in os.listdir(directory):
            state = _read(directory, f"{task}/stat").rpartition(b") ")[2][:1]
            ran, waited, _ = _read(directory, f"{task}/schedstat").split()
            tasks.append((task.encode(), state, int(ran), int(waited)))
        return tasks
    finally:
        os.close(directory)


def _read(directory: int, path: str) -> bytes:
    file = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)
