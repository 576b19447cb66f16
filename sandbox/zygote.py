"""The process of a cell that forks one child per program and reports how the child exited.

Takes a spec with descriptors from the host; waits for the child, a cancellation or a limit; sends a
reply. It never reads code or data. It ends when the host's end of the socket closes, and with its
parent in any case.
"""

from __future__ import annotations

import _socket  # socket itself would add a third of a megabyte of enumerations to each fork
import gc
import mmap
import os
import resource
import select
import sys
import time
from resource import setrlimit as set_limit

from . import child, landlock, linux, namespaces, preload, programs, seccomp, watch
from .child import Jail
from .protocol import (
    LANDLOCK,
    MAX_DESCRIPTORS,
    NAMESPACES,
    NOTHING,
    RESULT,
    Ending,
    Hello,
    JobSpec,
    Mode,
    Reply,
)

_SIGKILL = 9
_UNPRIVILEGED_UID = 65_534
_LIMITED = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_STACK: 64 << 20,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_CPU: sys.maxsize,
    resource.RLIMIT_FSIZE: sys.maxsize,
    resource.RLIMIT_NPROC: sys.maxsize,
    resource.RLIMIT_AS: sys.maxsize,
}
"""Limits that the zygote sets once for itself and all children; sys.maxsize: set by each child."""

_NO_FAULT = bytes(child.FAULT_END)


def main(arguments: list[str]) -> None:
    """Enter the requested level, then serve.

    Arguments: level, host pid, socket descriptor, package=directory ..., readable paths.
    """
    level, host, descriptor = map(int, arguments[:3])
    rest = arguments[3:]
    readable = [path for path in rest if path.startswith("/")]
    if level not in (NAMESPACES, LANDLOCK, NOTHING):
        raise ValueError(f"unknown level {level}; levels are 1, 2 and 3")
    preload.load()
    preload.load_packages(dict(named.split("=", 1) for named in rest if not named.startswith("/")))
    proc = watch.open_proc()  # before the namespaces hide it
    if level == NAMESPACES:
        namespaces.become_first_process(readable, host, descriptor)
        os.chdir(namespaces.SCRATCH)
    else:
        linux.die_with(host)
        os.chdir("/")
    _serve(_socket.socket(fileno=descriptor), _prepare(level, readable, proc))


def _prepare(level: int, readable: list[str], proc: int) -> Jail:
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    hard = {resource_kind: _hard_limit(resource_kind) for resource_kind in _LIMITED}
    for resource_kind, value in _LIMITED.items():
        if value != sys.maxsize:
            limit = min(value, hard[resource_kind])
            set_limit(resource_kind, (limit, limit))
    uid = -1
    if level == LANDLOCK and os.geteuid() == 0 and all(map(_is_open_to_others, readable)):
        uid = _UNPRIVILEGED_UID
    seal = (linux.prepare_seccomp(seccomp.build_filter()),) if level < NOTHING else ()
    page = mmap.mmap(-1, mmap.PAGESIZE)
    programs.warm_up()
    jail = _confined(Jail(level, -1, (), seal, uid, hard, _address_space(), page, proc), readable)
    gc.collect()
    gc.freeze()
    return jail


def _hard_limit(which: int) -> int:
    _, hard = resource.getrlimit(which)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _confined(jail: Jail, readable: list[str]) -> Jail:
    """The jail with rules on the paths as they are mounted now."""
    if jail.level == NOTHING:
        return jail
    confine = [linux.prepare_capability_drop()]
    if jail.level == NAMESPACES:
        ruleset = landlock.create_ruleset(["/"], [namespaces.SCRATCH])
    else:
        ruleset = landlock.create_ruleset([*namespaces.SYSTEM, *readable, *namespaces.DEVICES], [])
        if ruleset < 0:
            raise OSError("this kernel has no Landlock")
        confine.insert(0, linux.prepare_death_with_parent())
    if ruleset >= 0:
        confine.append(linux.prepare_landlock(ruleset))
    return jail._replace(ruleset=ruleset, confine=tuple(confine))


def _is_open_to_others(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & 1:
            return False
        path = os.path.dirname(path)
    return True


def _address_space() -> int:
    """Bytes of address space of this process, to which a child's limit is added.

    It is measured by trying limits, because a cell has no /proc to read it from.
    """
    limit = 1 << 34
    for step in (1 << 28, 1 << 24, 1 << 20):
        while limit > step and _fits(limit - step):
            limit -= step
    return limit


def _fits(limit: int) -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    set_limit(resource.RLIMIT_AS, (limit, hard))
    try:
        mmap.mmap(-1, mmap.PAGESIZE).close()
    except (OSError, MemoryError):
        return False
    finally:
        set_limit(resource.RLIMIT_AS, (soft, hard))
    return True


def _serve(host: _socket.socket, jail: Jail) -> None:
    with open("/dev/null", "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    uid = os.geteuid() if jail.uid < 0 else jail.uid
    hello = Hello(jail.level, linux.landlock_abi(), bool(jail.seal), uid, os.getpid())
    host.send(hello.pack())
    space = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
    poller = select.poll()
    poller.register(host.fileno(), select.POLLIN)
    while True:
        data, ancillary, _flags, _address = host.recvmsg(4096, space)
        if not data:
            os._exit(0)
        if not ancillary:
            continue  # a cancellation that came after the end of its job
        descriptors = memoryview(ancillary[0][2]).cast("i").tolist()
        reply = _run(JobSpec.unpack(data), descriptors, jail, poller)
        if jail.level == NAMESPACES and not namespaces.scratch_is_clean():
            namespaces.renew_scratch()
            os.chdir(namespaces.SCRATCH)
            if jail.ruleset >= 0:
                os.close(jail.ruleset)
            # a rule on a directory that a later mount hides does not apply
            jail = _confined(jail, [])
        host.send(reply.pack())


def _run(spec: JobSpec, descriptors: list[int], jail: Jail, poller: select.poll) -> Reply:
    """Fork the job's children, watch the last one, and end all of them.

    The reply has the CPU time of all children and the memory of the largest.
    """
    started = time.monotonic()
    jail.ready[: child.FAULT_END] = _NO_FAULT
    pipes = [*os.pipe(), *os.pipe()] if spec.mode == Mode.JUDGE else []
    pids, limits = [], child.limits(spec, jail)
    for part in child.parts(spec, descriptors, pipes):
        pid = linux.fork()
        if pid == 0:
            child.main(part, limits, jail)
        pids.append(pid)
    result = descriptors[RESULT]
    for descriptor in (*descriptors, *pipes):
        if descriptor != result:
            os.close(descriptor)
    process = os.pidfd_open(pids[-1])
    poller.register(process, select.POLLIN)
    try:
        ending = watch.watch(spec, pids, process, result, poller, jail.proc)
    finally:
        poller.unregister(process)
        os.close(process)
        os.close(result)
    # The judging child exits first: it would take its solver's end for an answer.
    for pid in reversed(pids):
        if ending != Ending.EXITED or pid != pids[-1]:
            os.kill(pid, _SIGKILL)
    cpu_s, peak_kb, code = 0.0, 0, 0
    for pid in pids:
        _, status, usage = os.wait4(pid, 0)
        cpu_s += usage.ru_utime + usage.ru_stime
        peak_kb = max(peak_kb, usage.ru_maxrss)
        code = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - started
    if ending != Ending.CANCELLED and not all(jail.ready[: len(pids)]):
        fault = jail.ready[child.FAULT_START : child.FAULT_END].strip(b"\0 ")
        return Reply(Ending.FAULT, code, cpu_s, wall_s, 0, fault)
    if ending == Ending.EXITED and code < 0:
        ending, code = Ending.SIGNALED, -code
    return Reply(ending, code, cpu_s, wall_s, peak_kb * 1024)
