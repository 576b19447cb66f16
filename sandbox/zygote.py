"""The process of a cell that forks one child per program and says how it ended. It never sees code
or data.

Takes a request with descriptors from the host; waits for the child, a cancellation or the end of a
limit; gives a reply.  Ends when the host's end of the socket closes, and with its parent in any
case.
"""

from __future__ import annotations

import _socket  # socket itself would bring a third of a megabyte of enumerations into each fork
import gc
import mmap
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import child, landlock, linux, namespaces, preload, programs, seccomp, watch
from .protocol import MAX_DESCRIPTORS, RESULT, Ending, Hello, Mode, Reply, Request

NAMESPACES, LANDLOCK, NOTHING = 1, 2, 3
_SIGKILL = 9
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
    """What each child is locked down with. ready: a shared byte the child sets once it is; uid: -1
    to keep it.

    confine: what it gives up first; seal: the filter of system calls, after which nothing can be
    undone.
    """

    level: int
    ruleset: int
    confine: tuple[Callable[[], None], ...]
    seal: tuple[Callable[[], None], ...]
    uid: int
    hard_limits: Mapping[int, int]
    base_address_space: int
    ready: mmap.mmap
    proc: int = -1


def main(arguments: list[str]) -> None:
    """Enter the wanted level, then serve. Arguments: level, host pid, socket descriptor,
    package=directory ..., readable paths.
    """
    level, host, descriptor, rest = (
        int(arguments[0]),
        int(arguments[1]),
        int(arguments[2]),
        arguments[3:],
    )
    readable = [path for path in rest if path.startswith("/")]
    if level not in (NAMESPACES, LANDLOCK, NOTHING):
        raise ValueError(f"there is no level {level}")
    preload.load()
    preload.load_packages(dict(named.split("=", 1) for named in rest if not named.startswith("/")))
    proc = watch.open_proc()
    if level == NAMESPACES:
        namespaces.enter(readable)
        _die_with(host)
        inner = os.fork()
        if inner:
            os.close(descriptor)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
        linux.prctl(linux.PR_SET_PDEATHSIG, _SIGKILL)
        namespaces.mount_scratch()
        os.chdir(namespaces.SCRATCH)
    else:
        _die_with(host)
        os.chdir("/")
    _serve(_socket.socket(fileno=descriptor), _prepare(level, readable)._replace(proc=proc))


def _die_with(host: int) -> None:
    linux.prctl(linux.PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != host:
        os._exit(0)


def _prepare(level: int, readable: list[str]) -> Jail:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    limits = {which: resource.getrlimit(which)[1] for which in _LIMITED}
    hard = {
        which: sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for which, limit in limits.items()
    }
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
    """Bytes of address space this process has now; a child's limit comes on top. Without /proc, a
    measured guess.
    """
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


def _serve(host: _socket.socket, jail: Jail) -> None:
    has_seccomp = bool(jail.seal)
    with open("/dev/null", "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    host.send(
        Hello(
            jail.level,
            linux.landlock_abi(),
            has_seccomp,
            os.geteuid() if jail.uid < 0 else jail.uid,
            os.getpid(),
        ).pack()
    )
    space = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
    poller = select.poll()
    poller.register(host.fileno(), select.POLLIN)
    while True:
        data, ancillary, _flags, _address = host.recvmsg(4096, space)
        if not data:
            os._exit(0)
        if not ancillary:
            continue  # a cancellation that came after the end of its job
        reply = _run(
            Request.unpack(data), memoryview(ancillary[0][2]).cast("i").tolist(), jail, poller
        )
        if jail.level == NAMESPACES and not namespaces.scratch_is_clean():
            namespaces.renew_scratch()
            os.chdir(namespaces.SCRATCH)
            if jail.ruleset >= 0:
                os.close(jail.ruleset)
            jail = _confined(jail, [])
        host.send(reply.pack())


def _run(request: Request, descriptors: list[int], jail: Jail, poller: select.poll) -> Reply:
    """Fork the job's children, watch the last one, end all. CPU time and memory are those of all
    and of the largest.
    """
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
        ending = watch.watch(request, pids, process, result, poller, jail.proc)
    finally:
        poller.unregister(process)
        os.close(process)
        os.close(result)
    for pid in reversed(
        pids
    ):  # the judging child first, which would take its solver's end for an answer
        if ending != Ending.EXITED or pid != pids[-1]:
            os.kill(pid, _SIGKILL)
    cpu, peak, code = 0.0, 0, 0
    for pid in pids:
        _, status, usage = os.wait4(pid, 0)
        cpu, peak, code = (
            cpu + usage.ru_utime + usage.ru_stime,
            max(peak, usage.ru_maxrss),
            os.waitstatus_to_exitcode(status),
        )
    wall = time.monotonic() - started
    if ending != Ending.CANCELLED and not all(jail.ready[: len(pids)]):
        return Reply(
            Ending.FAULT,
            code,
            cpu,
            wall,
            0,
            jail.ready[child.FAULT_AT : child.FAULT_AT + child.FAULT_BYTES].strip(b"\0 "),
        )
    if ending == Ending.EXITED and code < 0:
        ending, code = Ending.SIGNALED, -code
    return Reply(ending, code, cpu, wall, peak * 1024)
