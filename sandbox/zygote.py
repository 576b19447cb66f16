"""The process of a cell that forks one child per program, watches its CPU time and says how it ended. It never sees code or data.

Takes a request with descriptors from the host; waits for the child, a cancellation or the end of a limit; gives a reply.  Ends when the
host's end of the socket closes, and with its parent in any case.  CPU time decides; the wall clock counts only time in which this process
was itself scheduled, so that a stalled machine flips no verdict.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import child, landlock, linux, namespaces, preload, programs, seccomp
from .protocol import MAX_DESCRIPTORS, RESULT, Ending, Hello, Mode, Reply, Request

NAMESPACES, LANDLOCK, NOTHING = 1, 2, 3
_TICK_S = 0.02
_IDLE_SHARE = 0.01
_NOBODY = 65_534
_LIMITED = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_STACK: 64 << 20,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CPU: sys.maxsize,
    resource.RLIMIT_FSIZE: sys.maxsize,
    resource.RLIMIT_NPROC: sys.maxsize,
    resource.RLIMIT_AS: sys.maxsize,
}
"""What the zygote sets once for itself and all children; sys.maxsize: set by each child."""


class Jail(NamedTuple):
    """What each child is locked down with. ready: a shared byte the child sets once it is; uid: -1 to keep it.

    confine: what it gives up first; seal: the filter of system calls, after which nothing can be undone.
    """

    level: int
    ruleset: int
    confine: tuple[Callable[[], None], ...]
    seal: tuple[Callable[[], None], ...]
    uid: int
    hard_limits: Mapping[int, int]
    base_address_space: int
    ready: mmap.mmap


def main(arguments: list[str]) -> None:
    """Enter the wanted level, then serve. Arguments: level, host pid, socket descriptor, readable paths."""
    level, host, descriptor, readable = int(arguments[0]), int(arguments[1]), int(arguments[2]), arguments[3:]
    if level not in (NAMESPACES, LANDLOCK, NOTHING):
        raise ValueError(f"there is no level {level}")
    preload.load()
    if level == NAMESPACES:
        namespaces.enter(readable)
        _die_with(host)
        inner = os.fork()
        if inner:
            os.close(descriptor)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        namespaces.mount_scratch()
        os.chdir(namespaces.SCRATCH)
    else:
        _die_with(host)
        os.chdir("/")
    with socket.socket(fileno=descriptor) as host_socket:
        _serve(host_socket, _prepare(level, readable))


def _die_with(host: int) -> None:
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        os._exit(0)


def _prepare(level: int, readable: list[str]) -> Jail:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    limits = {which: resource.getrlimit(which)[1] for which in _LIMITED}
    hard = {which: sys.maxsize if limit == resource.RLIM_INFINITY else limit for which, limit in limits.items()}
    for which, value in _LIMITED.items():
        if value != sys.maxsize:
            resource.setrlimit(which, (min(value, hard[which]),) * 2)
    uid = -1
    if level == LANDLOCK and os.geteuid() == 0 and all(_open_to_others(path) for path in readable):
        uid = _NOBODY
    seal = (linux.prepare_seccomp(seccomp.build_filter()),) if level < NOTHING else ()
    page = mmap.mmap(-1, mmap.PAGESIZE)
    programs.warm_up()
    jail = _confined(Jail(level, -1, (), seal, uid, hard, _address_space(), page), readable)
    gc.collect()
    gc.freeze()
    return jail


def _confined(jail: Jail, readable: list[str]) -> Jail:
    """The jail with rules on the paths as they are mounted now."""
    if jail.level == NOTHING:
        return jail
    if jail.level == NAMESPACES:
        ruleset = landlock.create_ruleset(["/"], [namespaces.SCRATCH])
        confine = [linux.prepare_capability_drop()]
    else:
        ruleset = landlock.create_ruleset([*namespaces.SYSTEM, *readable, *namespaces.DEVICES], [])
        confine = [linux.prepare_death_with_parent(), linux.prepare_capability_drop()]
        if ruleset < 0:
            raise OSError("this kernel has no Landlock")
    if ruleset >= 0:
        confine.append(linux.prepare_landlock(ruleset))
    return jail._replace(ruleset=ruleset, confine=tuple(confine))


def _open_to_others(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & 1:
            return False
        path = os.path.dirname(path)
    return True


def _address_space() -> int:
    """Bytes of address space this process has now; a child's limit comes on top. Without /proc, a measured guess."""
    limit = 1 << 34
    for step in (1 << 28, 1 << 24, 1 << 20):
        while limit > step and _fits(limit - step):
            limit -= step
    return limit


def _fits(limit: int) -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        mmap.mmap(-1, mmap.PAGESIZE).close()
    except (OSError, MemoryError):
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return True


def _serve(host: socket.socket, jail: Jail) -> None:
    has_seccomp = bool(jail.seal)
    with open("/dev/null", "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    host.send(Hello(jail.level, linux.landlock_abi(), has_seccomp, os.geteuid() if jail.uid < 0 else jail.uid, os.getpid()).pack())
    poller = select.poll()
    poller.register(host.fileno(), select.POLLIN)
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(host, 4096, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        if not descriptors:
            continue  # a cancellation that came after the end of its job
        reply = _run(Request.unpack(data), descriptors, jail, poller)
        if jail.level == NAMESPACES and not namespaces.scratch_is_clean():
            namespaces.renew_scratch()
            os.chdir(namespaces.SCRATCH)
            if jail.ruleset >= 0:
                os.close(jail.ruleset)
            jail = _confined(jail, [])
        host.send(reply.pack())


def _run(request: Request, descriptors: list[int], jail: Jail, poller: select.poll) -> Reply:
    """Fork the job's children, watch the last one, end all. CPU time and memory are those of all and of the largest."""
    started = time.monotonic()
    jail.ready[: child.FAULT_AT + child.FAULT_BYTES] = bytes(child.FAULT_AT + child.FAULT_BYTES)
    pipes = [*os.pipe(), *os.pipe()] if request.mode == Mode.JUDGE else []
    pids = []
    for part in child.parts(request, descriptors, pipes):
        pid = linux.fork()
        if pid == 0:
            child.main(request, part, jail)
        pids.append(pid)
    result = descriptors[RESULT]
    for descriptor in (*descriptors, *pipes):
        if descriptor != result:
            os.close(descriptor)
    process = os.pidfd_open(pids[-1])
    poller.register(process, select.POLLIN)
    try:
        ending = _watch(request, pids, process, result, poller)
    finally:
        poller.unregister(process)
        os.close(process)
        os.close(result)
    for pid in reversed(pids):  # the judging child first, which would take its solver's end for an answer
        if ending != Ending.EXITED or pid != pids[-1]:
            os.kill(pid, signal.SIGKILL)
    cpu, peak, code = 0.0, 0, 0
    for pid in pids:
        _, status, usage = os.wait4(pid, 0)
        cpu, peak, code = cpu + usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss), os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - started
    if ending != Ending.CANCELLED and not all(jail.ready[: len(pids)]):
        return Reply(Ending.FAULT, code, cpu, wall, 0, jail.ready[child.FAULT_AT : child.FAULT_AT + child.FAULT_BYTES].strip(b"\0 "))
    if ending == Ending.EXITED and code < 0:
        ending, code = Ending.SIGNALED, -code
    return Reply(ending, code, cpu, wall, peak * 1024)


def _watch(request: Request, pids: list[int], process: int, result: int, poller: select.poll) -> Ending:
    """Wait for the child's end or the end of a limit. A run is counted as done when the result file grows."""
    clocks = [(~pid << 3) | 2 for pid in pids]
    size, run_cpu, last_cpu, run_wall, total_wall, idle = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    while True:
        before = time.monotonic()
        ready = poller.poll(_TICK_S * 1000)
        if ready:
            return Ending.EXITED if any(fd == process for fd, _ in ready) else Ending.CANCELLED
        elapsed = min(time.monotonic() - before, 2 * _TICK_S)
        try:
            cpu = sum(map(time.clock_gettime, clocks))
        except OSError:
            continue  # it has just ended; the next poll says so
        if (now := os.fstat(result).st_size) != size:
            size, run_cpu, run_wall, idle = now, last_cpu, 0.0, 0.0
        idle = idle + elapsed if cpu - last_cpu < _IDLE_SHARE * elapsed else 0.0
        run_wall, total_wall, last_cpu = run_wall + elapsed, total_wall + elapsed, cpu
        if cpu - run_cpu > request.cpu_s or cpu > request.cpu_s * request.num_runs:
            return Ending.CPU
        if idle > request.wall_s or run_wall > 4 * request.wall_s or total_wall > 4 * request.wall_s * request.num_runs:
            return Ending.WALL
