"""CPU time, memory and sleep of programs, read from the host's /proc, and the limits that they
exceed.

CPU time decides. Sleep is limited too, so that a program cannot wait forever. Only time counts
as sleep when no task ran, waited for a core or waited for a disk, and in which this process
itself was scheduled; a crowded or stalled machine therefore makes no program late. The kernel's
counts are used, not samples of the state: a program that sleeps in short pieces may be awake at
each sample. Invariants: limits apply to the whole job, and nothing that a program writes extends
them.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence
from typing import NamedTuple

from .protocol import Ending, JobSpec

_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/N/stat after the name: parent; the four CPU times, the last one excluded.
_PPID, _UTIME, _CSTIME = 1, 11, 15
# The precision of the limits. A program that exits within one tick is never measured.
_TICK_S, _TICK_MS = 0.02, 20
# A run that takes this share of the limit after other runs in the same child exits there: it runs
# again in a separate child, with the whole limit. Without this rule, a program that times out in
# its second test would use the limit twice.
_SHARED_SHARE = 0.25
# A program whose tasks exit during each look may have waited for the machine: a third of its idle
# time counts as sleep. Not none of it, or threads without end would hold the cell.
_UNSEEN_FACTOR = 3
# Bytes of the result file that are searched for a second frame when watching starts.
_FIRST_FRAMES = 4096
# Low bits of the kernel's clock id for the CPU time of a process (CPUCLOCK_SCHED).
_CLOCK_OF_PROCESS = 2


def open_proc() -> int:
    """A descriptor of the host's /proc, closed in every child. Raises OSError."""
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _read(proc: int, path: str) -> bytes:
    # By the descriptor: the cell has no path to /proc.
    file = os.open(path, os.O_RDONLY, dir_fd=proc)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def address_space(proc: int) -> int:
    """Bytes of address space of this process."""
    return int(_read(proc, "self/statm").split()[0]) * _PAGE


class Progress(NamedTuple):
    """The tasks of one process since the previous look.

    ran_ns: of all tasks; waited_ns: for a core, the longest wait of one task, because tasks that
    wait for each other would otherwise count as busy without running; is_blocked: a task is still
    waiting for a core, which the kernel counts only afterwards, or for a disk, which it never
    counts. A task that a signal has stopped is asleep.
    """

    ran_ns: int
    waited_ns: int
    is_blocked: bool


class Tasks:
    """Looks at the tasks of processes. proc: descriptor of the host's /proc."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._counts: dict[str, tuple[int, int]] = {}

    def progress(self, number: int) -> Progress:
        """The progress of the process with this number. Raises OSError if it has exited."""
        ran_ns, longest_wait_ns, is_blocked = 0, 0, False
        folder = os.open(f"{number}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            for task in os.listdir(folder):
                state = _read(folder, f"{task}/stat").rpartition(b") ")[2][:1]
                ran, waited = map(int, _read(folder, f"{task}/schedstat").split()[:2])
                ran_before, waited_before = self._counts.get(task, (0, 0))
                self._counts[task] = ran, waited
                if (ran, waited) == (ran_before, waited_before) and state not in b"STtZX":
                    is_blocked = True
                ran_ns += ran - ran_before
                longest_wait_ns = max(longest_wait_ns, waited - waited_before)
        finally:
            os.close(folder)
        return Progress(ran_ns, longest_wait_ns, is_blocked)


def _asleep_s(elapsed_s: float, processes: Sequence[Progress], *, take_turns: bool) -> float:
    """Seconds of the last `elapsed_s` in which no task of the processes ran or wanted a core.

    take_turns: only one process has work at a time, so their waits add up; otherwise they overlap.
    """
    # The kernel counts this wait later or never, so no part of the period may count as sleep.
    if any(process.is_blocked for process in processes):
        return 0.0
    waits = [process.waited_ns for process in processes]
    waited_ns = sum(waits) if take_turns else max(waits, default=0)
    busy_ns = sum(process.ran_ns for process in processes) + waited_ns
    return max(0.0, elapsed_s - busy_ns / 1e9)


def watch(
    spec: JobSpec, pids: Sequence[int], process: int, result: int, poller: select.poll, proc: int
) -> Ending:
    """Wait until the child behind the descriptor `process` exits, or all `pids` together exceed a
    limit. A run counts as done when the result file grows.
    """
    # Most programs exit within the first tick: nothing is measured for them.
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
    tasks = Tasks(proc)
    while True:
        before = time.monotonic()
        ready = poller.poll(_TICK_MS)
        if ready:
            return ready
        # At most two ticks: if this process was not scheduled, the program may not have been
        # either.
        elapsed = min(time.monotonic() - before, 2 * _TICK_S)
        try:
            cpu = sum(map(time.clock_gettime, clocks))
        except OSError:
            continue  # a child has just exited; the next poll reports it
        try:
            processes = [tasks.progress(_number_in_host(proc, pid)) for pid in pids]
            # A test and its program: each waits for the other.
            asleep += _asleep_s(elapsed, processes, take_turns=True)
        except OSError:  # a task has exited during the look
            asleep += max(0.0, elapsed - (cpu - last_cpu)) / _UNSEEN_FACTOR
        last_cpu = cpu
        new_size = os.fstat(result).st_size
        # A run has finished: the next run starts with an unused share of the CPU time.
        if new_size != size:
            size, run_cpu, has_shared = new_size, cpu, spec.num_tests > 1
        if cpu > spec.cpu_s or (has_shared and cpu - run_cpu > _SHARED_SHARE * spec.cpu_s):
            return Ending.CPU
        if asleep > spec.sleep_s:
            return Ending.WALL


def _number_in_host(proc: int, pid: int) -> int:
    """The number of a process in the host's /proc: a namespace has other numbers, but the fdinfo of
    a descriptor of the process contains the host's.
    """
    process = os.pidfd_open(pid)
    try:
        number = _PID.search(_read(proc, f"self/fdinfo/{process}"))
    finally:
        os.close(process)
    if number is None:
        raise ProcessLookupError(f"process {pid} has no number in /proc")
    return int(number[1])


class Usage(NamedTuple):
    """State of a tree of processes.

    cpu_s: of live processes and of those that they waited for; memory_bytes: resident, without
    pages of files; asleep_s: since the previous look.
    """

    cpu_s: float
    memory_bytes: int
    asleep_s: float


class ProcessTree:
    """The descendants of a process. proc: descriptor of the host's /proc; root: the number of the
    process there, by default of this process.

    A process belongs to the tree if its parent does, or if its parent is the root: as first process
    of its namespace, a zygote inherits every orphan. The parent of a process is read only when the
    process appears, so that a look on a busy host costs one directory listing.
    """

    def __init__(self, proc: int, root: int | None = None) -> None:
        self._proc = proc
        self._root = root or int(os.readlink("self", dir_fd=proc))
        self._known: dict[int, bool] = {}
        self._tasks = Tasks(proc)

    def use(self, elapsed_s: float) -> Usage:
        """Usage now; elapsed_s: since the previous look."""
        cpu_s, memory = 0.0, 0
        processes = []
        for number in self._members():
            try:
                stat = self._stat(number)
                pages = _read(self._proc, f"{number}/statm").split()
                processes.append(self._tasks.progress(number))
            except OSError:
                continue  # it has exited since the listing
            cpu_s += sum(map(int, stat[_UTIME:_CSTIME])) / _TICKS
            memory += (int(pages[1]) - int(pages[2])) * _PAGE
        return Usage(cpu_s, memory, _asleep_s(elapsed_s, processes, take_turns=False))

    def _members(self) -> list[int]:
        listed = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        known = {number: mine for number, mine in self._known.items() if number in listed}
        parents: dict[int, int] = {}
        for number in listed - known.keys():
            try:
                parents[number] = int(self._stat(number)[_PPID])
            except OSError:
                continue
        for number, ancestor in parents.items():
            while ancestor != self._root and ancestor in parents:
                ancestor = parents[ancestor]
            known[number] = ancestor == self._root or known.get(ancestor, False)
        self._known = known
        return [number for number, mine in known.items() if mine]

    def _stat(self, number: int) -> list[bytes]:
        return _read(self._proc, f"{number}/stat").rpartition(b") ")[2].split()
