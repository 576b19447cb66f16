"""Forked children: how one locks itself down and runs its part, and how the zygote collects all.

The order matters: user, capabilities and Landlock first, then descriptors and limits, and the
filter of system calls last; afterwards nothing can be undone.
"""

import math
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from resource import setrlimit as set_limit
from typing import NoReturn

from . import linux
from .protocol import Ending, Reply

MAX_TASKS = 64
# Enough for a linker and its libraries. A larger table is memory of the kernel, which no limit
# counts.
_MAX_OPEN = 256
# The kernel's largest limit of descriptors; closerange is one call for all.
_MAX_DESCRIPTOR = 1 << 20
# The shared page has one byte per child that runs Python, set once the child is locked down, and
# then the reason why a child could not be locked down.
_FAULT_START = 8
_FAULT_BYTES = 256

Limits = Sequence[tuple[int, tuple[int, int]]]
"""Arguments of setrlimit."""
Step = Callable[[], int]
"""Gives up rights that the process cannot regain."""


class Page:
    """Memory that a zygote shares with its children, so that they can report."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def clear(self) -> None:
        """Remove the reports of the previous job."""
        self._page[:] = bytes(mmap.PAGESIZE)

    def set_ready(self, number: int) -> None:
        """In a child: report that it is locked down. It can no longer write to the page."""
        # Unmapped afterwards, so that a program cannot report that it never ran.
        self._page[number] = 1
        self._page.close()

    def set_fault(self, error: BaseException) -> None:
        """In a child: report why it could not be locked down."""
        reason = f"{type(error).__name__}: {error}".encode()
        self._page.seek(_FAULT_START)
        self._page.write(reason[:_FAULT_BYTES])

    def fault(self, count: int) -> str:
        """Why one of the first `count` children was not locked down; empty if all were."""
        reported = self._page[_FAULT_START:].strip(b"\0")
        if reported or all(self._page[:count]):
            return reported.decode(errors="replace")
        return "a child exited before it was locked down"


class Children:
    """The children of one piece of work, from the first fork until all have exited.

    pids: in order of their forks; code: exit status of the last once it has exited, a signal as a
    negative number; cpu_s, peak_bytes: of all that have exited.
    """

    def __init__(self, page: Page) -> None:
        page.clear()
        self._page = page
        self._started = time.monotonic()
        self.pids: list[int] = []
        self.code: int | None = None
        self.cpu_s = 0.0
        self.peak_bytes = 0

    def fork(self, start: Callable[..., None], *arguments: object) -> int:
        """Fork a child that runs `start`; return its descriptor."""
        pid = linux.fork()
        if pid == 0:
            _main(self._page, start, *arguments)
        self.pids.append(pid)
        return os.pidfd_open(pid)

    def collect(self, flags: int = 0) -> bool:
        """Collect a process that has exited, an orphan too; False if there is none."""
        try:
            pid, status, usage = os.wait4(-1, flags)
        except ChildProcessError:
            return False
        if pid == 0:
            return False
        self.cpu_s += usage.ru_utime + usage.ru_stime
        self.peak_bytes = max(self.peak_bytes, usage.ru_maxrss * 1024)
        if pid == self.pids[-1]:
            self.code = os.waitstatus_to_exitcode(status)
        return True

    def reply(self, ending: Ending, num_ready: int = 0) -> Reply:
        """The reply once all have exited. num_ready: children that report once they are locked
        down.
        """
        wall_s = time.monotonic() - self._started
        code = self.code or 0
        fault = self._page.fault(num_ready)
        # A cancelled child may have had no time to lock down.
        if fault and ending != Ending.CANCELLED:
            return Reply(Ending.FAULT, code, self.cpu_s, wall_s, 0, fault)
        if ending == Ending.EXITED and code < 0:
            ending = Ending.SIGNALED
        return Reply(ending, abs(code), self.cpu_s, wall_s, self.peak_bytes)


def limits_of(cpu_s: float, file_bytes: int, more: Iterable[tuple[int, int]]) -> Limits:
    """The limits of a child, none above the hard limit of this process. more: kind and value."""
    limits = []
    wanted = (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN),
        # Two seconds more, so that the watch decides, which counts more exactly.
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + 2),
        (resource.RLIMIT_FSIZE, file_bytes),
        # Threads count as tasks, also those of other children of the same user.
        (resource.RLIMIT_NPROC, MAX_TASKS),
    )
    for kind, value in (*wanted, *more):
        _, hard = resource.getrlimit(kind)
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        limits.append((kind, (lowest, lowest)))
    return limits


def lock_down(
    confine: Sequence[Step], kept: Iterable[int], limits: Limits, seal: Sequence[Step]
) -> None:
    """Give up rights, close all descriptors but 0, 1, 2 and `kept`, set the limits, and seal."""
    # In this order: closing needs no rights, and the seal forbids setrlimit.
    for give_up in confine:
        give_up()
    lowest = 2
    # Ranges between the kept ones: asking which are open needs /proc.
    for keep in (*sorted(kept), _MAX_DESCRIPTOR):
        os.closerange(lowest + 1, keep)
        lowest = keep
    for kind, pair in limits:
        set_limit(kind, pair)
    for give_up in seal:
        give_up()


def _main(page: Page, start: Callable[..., None], *arguments: object) -> NoReturn:
    """Run `start` and exit. An error before it has locked down is a fault."""
    code = 1
    try:
        start(*arguments)
        code = 0
    except BaseException as error:
        page.set_fault(error)
        raise
    finally:
        # Not sys.exit: the handlers and buffers that the child inherited are the zygote's.
        os._exit(code)
