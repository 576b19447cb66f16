"""CPU time, memory and sleep of programs, read from the host's /proc, and the limits that they
exceed.

CPU time decides. Sleep is limited too, so that a program cannot wait forever. Only time counts
as sleep when no task ran, waited for a core or waited for a disk, and in which this process
itself was scheduled; a crowded or stalled machine therefore makes no program late. The kernel's
counts are used, not samples of the state: a program that sleeps in short pieces may be awake at
each sample. Invariants: limits apply to the whole job, and nothing that a program writes extends
them.
"""

import math
import os
import re
import select
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from .protocol import SLEEP_S, CommandSpec, Ending, JobSpec

_PID = re.compile(rb"^Pid:\t(\d+)$", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/N/stat after the name: parent; the four CPU times, the last one excluded.
_PPID = 1
_UTIME = 11
_CSTIME = 15
# The precision of the limits. A program that exits within one tick is never measured.
_TICK_S = 0.02
_TICK_MS = 20
# A program whose tasks exit during each look may have waited for the machine: a third of its idle
# time counts as sleep. Not none of it, or threads without end would hold the cell.
_UNSEEN_FACTOR = 3


def open_proc() -> int:
    """A descriptor of the host's /proc, closed in every child. Raises OSError."""
    return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def number_of_self(proc: int) -> int:
    """The number of this process in the host's /proc."""
    return int(os.readlink("self", dir_fd=proc))


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


class Usage(NamedTuple):
    """What processes use.

    cpu_s: of live processes and of those that they waited for; memory_bytes: resident, without
    pages of files; asleep_s: since the previous look.
    """

    cpu_s: float
    memory_bytes: int
    asleep_s: float


class Meter:
    """Looks at processes by their numbers in the host's /proc. proc: its descriptor."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._counts: dict[str, tuple[int, int]] = {}

    def use(self, numbers: Iterable[int], elapsed_s: float, *, take_turns: bool = False) -> Usage:
        """Usage now. elapsed_s: since the previous look; take_turns: only one process has work at a
        time, so their waits add up; otherwise they overlap.
        """
        cpu_s = 0.0
        memory = 0
        ran_ns = 0
        waits_ns = [0.0]
        is_unseen = False
        for number in numbers:
            try:
                stat = self._stat(number)
                pages = _read(self._proc, f"{number}/statm").split()
                # Before its tasks, which may exit during each look: the time of the process counts.
                cpu_s += sum(map(int, stat[_UTIME:_CSTIME])) / _TICKS
                memory += (int(pages[1]) - int(pages[2])) * _PAGE
                ran, waited_ns = self.progress(number)
            except OSError:  # it has exited, or one of its tasks has, during the look
                is_unseen = True
                continue
            ran_ns += ran
            waits_ns.append(waited_ns)
        busy_ns = ran_ns + (sum(waits_ns) if take_turns else max(waits_ns))
        asleep_s = max(0.0, elapsed_s - busy_ns / 1e9)
        return Usage(cpu_s, memory, asleep_s / _UNSEEN_FACTOR if is_unseen else asleep_s)

    def progress(self, number: int) -> tuple[int, float]:
        """Nanoseconds for which the tasks of a process ran since the previous look, and for which
        one of them waited for a core: the longest wait, because tasks that wait for each other
        would otherwise count as busy without running.
        """
        ran_ns = 0
        longest_wait_ns = 0.0
        folder = os.open(f"{number}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            for task in os.listdir(folder):
                state = _read(folder, f"{task}/stat").rpartition(b") ")[2][:1]
                ran, waited = map(int, _read(folder, f"{task}/schedstat").split()[:2])
                ran_before, waited_before = self._counts.get(task, (0, 0))
                self._counts[task] = ran, waited
                ran_ns += ran - ran_before
                longest_wait_ns = max(longest_wait_ns, waited - waited_before)
                # It still waits for a core, which the kernel counts only afterwards, or for a disk,
                # which it never counts: no part of the period may count as sleep. A task that a
                # signal has stopped is asleep.
                if (ran, waited) == (ran_before, waited_before) and state not in b"STtZX":
                    longest_wait_ns = math.inf
        finally:
            os.close(folder)
        return ran_ns, longest_wait_ns

    def _stat(self, number: int) -> list[bytes]:
        return _read(self._proc, f"{number}/stat").rpartition(b") ")[2].split()


class Budget:
    """What the processes of a job have used of its limits.

    measure: their usage now, given the seconds since the previous look; patience_s: wall time after
    which they count as hiding their usage; looked: time of the previous look; cpu_s, memory_bytes:
    the most that was seen.
    """

    def __init__(
        self,
        spec: JobSpec | CommandSpec,
        proc: int,
        measure: Callable[[float], Usage],
        patience_s: float = math.inf,
    ) -> None:
        self._spec = spec
        self._measure = measure
        self._peer = ProcessTree(proc, spec.peer) if spec.peer else None
        self._asleep_s = 0.0
        self.looked = time.monotonic()
        self._latest = self.looked + patience_s
        self.cpu_s = 0.0
        self.memory_bytes = 0

    def exceeded(self, tick_s: float, gone_s: float = 0.0) -> Ending | None:
        """The limit of time that is exceeded. gone_s: CPU time of processes that are not measured
        any more.
        """
        now = time.monotonic()
        # At most two ticks: if this process was not scheduled, the program may not have been
        # either.
        elapsed_s = min(now - self.looked, 2 * tick_s)
        self.looked = now
        usage = self._measure(elapsed_s)
        self.cpu_s = max(self.cpu_s, usage.cpu_s)
        self.memory_bytes = max(self.memory_bytes, usage.memory_bytes)
        asleep_s = usage.asleep_s
        if self._peer is not None:
            # Only time in which both sleep: each waits for the other. The zygote of the peer does
            # not count, which looks at processes as this one does.
            asleep_s = max(0.0, asleep_s + self._peer.use_of_all(elapsed_s).asleep_s - elapsed_s)
        self._asleep_s += asleep_s
        if usage.cpu_s + gone_s > self._spec.cpu_s:
            return Ending.CPU
        if self._asleep_s > self._spec.cpu_s + SLEEP_S or now > self._latest:
            return Ending.WALL
        return None


def watch(spec: JobSpec, processes: Sequence[int], poller: select.poll, proc: int) -> Ending:
    """Wait until the last child exits, or all together exceed a limit. processes: descriptors of
    the children.
    """
    ready = poller.poll(_TICK_MS)
    # Most programs exit within the first tick: nothing is measured for them.
    if not ready:
        meter = Meter(proc)
        # A namespace has other numbers than the host's /proc, but the fdinfo of a descriptor of a
        # process contains the host's.
        infos = [_read(proc, f"self/fdinfo/{process}") for process in processes]
        numbers = [int(_PID.findall(info)[0]) for info in infos]
        # A test and its program: each waits for the other.
        budget = Budget(spec, proc, partial(meter.use, numbers, take_turns=True))
        while not ready:
            ending = budget.exceeded(_TICK_S)
            if ending is not None:
                return ending
            ready = poller.poll(_TICK_MS)
    has_exited = any(fd == processes[-1] for fd, _ in ready)
    return Ending.EXITED if has_exited else Ending.CANCELLED


class ProcessTree(Meter):
    """The descendants of a process. root: its number in /proc, by default of this process.

    A process belongs to the tree if its parent does, or if its parent is the root: as first process
    of its namespace, a zygote inherits every orphan. The parent of a process is read only when the
    process appears, so that a look on a busy host costs one directory listing.
    """

    def __init__(self, proc: int, root: int | None = None) -> None:
        super().__init__(proc)
        self._root = root or number_of_self(proc)
        self._known: dict[int, bool] = {}

    def use_of_all(self, elapsed_s: float) -> Usage:
        """Usage of all descendants."""
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
        return self.use([number for number, mine in known.items() if mine], elapsed_s)
