"""CPU time, memory and sleep of a process and its descendants, read from the host's /proc.

A process belongs to the tree if its parent does, or if its parent is the zygote: as first process
of its namespace, the zygote inherits every orphan. The parent of a process is read only when the
process appears, so that a call on a busy host costs one directory listing.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PPID, _UTIME, _CSTIME = 1, 11, 15
"""Fields of /proc/N/stat after the name: parent; the four CPU times, the last one excluded."""


class Usage(NamedTuple):
    """State of the tree. asleep: no task ran, wanted a core or waited for a disk since the last
    call.

    cpu_s: of live processes and of those that they waited for; memory_bytes: resident, without
    pages of files.
    """

    cpu_s: float
    memory_bytes: int
    asleep_s: float


class ProcessTree:
    """The descendants of a process. proc: descriptor of the host's /proc; root: the process there,
    by default this one.
    """

    def __init__(self, proc: int, root: int | None = None) -> None:
        self._proc = proc
        self._own = root or int(os.readlink("self", dir_fd=proc))
        self._known: dict[int, bool] = {}
        self._tasks: dict[tuple[int, str], tuple[int, int]] = {}

    def use(self, elapsed_s: float) -> Usage:
        """Usage now; elapsed_s: since the last call."""
        cpu_s, memory, ran_ns, longest_wait_ns, is_blocked = 0.0, 0, 0, 0, False
        for number in self._members():
            try:
                stat = self._stat(number)
                pages = self._read(f"{number}/statm").split()
                ran, waited, blocked = self._progress(number)
            except OSError:
                continue  # it has ended since the listing
            cpu_s += sum(map(int, stat[_UTIME:_CSTIME])) / _TICKS
            memory += (int(pages[1]) - int(pages[2])) * _PAGE
            ran_ns += ran
            # Not the sum: tasks that wait for each other would count as busy without running.
            longest_wait_ns = max(longest_wait_ns, waited)
            is_blocked = is_blocked or blocked
        asleep_s = 0.0 if is_blocked else max(0.0, elapsed_s - (ran_ns + longest_wait_ns) / 1e9)
        return Usage(cpu_s, memory, asleep_s)

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
            while ancestor != self._own and ancestor in parents:
                ancestor = parents[ancestor]
            known[number] = ancestor == self._own or known.get(ancestor, False)
        self._known = known
        return [number for number, mine in known.items() if mine]

    def _progress(self, number: int) -> tuple[int, int, bool]:
        """Nanoseconds that the tasks of a process ran, and that one of them waited for a core; True
        if one is still waiting for a core, or for a disk, which the kernel does not count yet.
        """
        ran_ns, longest_wait_ns, is_blocked = 0, 0, False
        folder = os.open(f"{number}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            tasks = os.listdir(folder)
        finally:
            os.close(folder)
        for task in tasks:
            path = f"{number}/task/{task}"
            state = self._read(f"{path}/stat").rpartition(b") ")[2][:1]
            ran, waited = map(int, self._read(f"{path}/schedstat").split()[:2])
            before = self._tasks.get((number, task), (0, 0))
            self._tasks[number, task] = ran, waited
            if (ran, waited) == before and state not in b"SZX":
                is_blocked = True
            ran_ns += ran - before[0]
            longest_wait_ns = max(longest_wait_ns, waited - before[1])
        return ran_ns, longest_wait_ns, is_blocked

    def _stat(self, number: int) -> list[bytes]:
        return self._read(f"{number}/stat").rpartition(b") ")[2].split()

    def _read(self, path: str) -> bytes:
        file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(file, 4096)
        finally:
            os.close(file)
