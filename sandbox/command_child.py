"""The child that becomes a command: drops its rights in the order that each step needs, then calls
execve.

Descriptors and limits first, then capabilities, Landlock, the listener for the one execve, and the
filter of system calls last.
"""

from __future__ import annotations

import _socket
import mmap
import os
import resource
import signal
from collections.abc import Sequence
from typing import NamedTuple

from . import command_filters, landlock, linux, namespaces, one_exec
from .command_protocol import FIRST_FILE, STDIN, STDOUT, CommandSpec, Profile

_MAX_OPEN = 256
_FAULT_BYTES = 256


class Start(NamedTuple):
    """Further arguments of a child, besides its spec and descriptors.

    stderr: write end of a pipe; zygote: socket on which it sends the listener; fault: shared page
    for the reason why it could not execute.
    """

    filters: dict[int, bytes]
    stderr: int
    zygote: _socket.socket
    fault: mmap.mmap


def main(spec: CommandSpec, descriptors: Sequence[int], start: Start) -> None:
    """Lock down and execute. Ends the process in any case."""
    try:
        _execute(spec, descriptors, start)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".encode()[:_FAULT_BYTES]
        start.fault[: len(reason)] = reason
        raise
    finally:
        os._exit(1)


def fault_of(page: mmap.mmap) -> bytes:
    """The reason that a child left; empty if it executed its command."""
    return page[:_FAULT_BYTES].rstrip(b"\0")


def _execute(spec: CommandSpec, descriptors: Sequence[int], start: Start) -> None:
    # Python ignores these two; an ignored signal stays ignored after an execve.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    if spec.executable:
        executable = os.open(spec.executable, os.O_PATH | os.O_CLOEXEC)
    else:
        executable = descriptors[FIRST_FILE]
        os.set_inheritable(executable, False)
    ruleset = landlock.create_ruleset(
        [*spec.readable, *spec.runnable, "/dev/null", "/dev/urandom"],
        [namespaces.SCRATCH],
        spec.runnable,
    )
    kept = {executable, ruleset, start.zygote.fileno()} - {-1}
    for target, source in enumerate((descriptors[STDIN], descriptors[STDOUT], start.stderr)):
        os.dup2(source, target)
    linux.close_all_except(kept)
    _limit(spec)
    linux.prepare_capability_drop()()
    if ruleset >= 0:
        linux.prepare_landlock(ruleset)()
        os.close(ruleset)
    filter_ = command_filters.of_process(start.filters[spec.profile], os.getpid())
    seal = linux.prepare_seccomp(filter_)
    if spec.profile == Profile.PROGRAM:
        one_exec.ask_before_exec(start.zygote)
    start.zygote.close()
    seal()
    os.execve(executable, spec.arguments, spec.environment)


def _limit(spec: CommandSpec) -> None:
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_OPEN),
        (resource.RLIMIT_CPU, int(spec.cpu_s) + 2),
        (resource.RLIMIT_FSIZE, spec.file_bytes),
        (resource.RLIMIT_NPROC, spec.max_tasks),
        (resource.RLIMIT_DATA, spec.data_bytes),
        (resource.RLIMIT_AS, spec.address_space_bytes),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(which)
        is_open = value == 0 and which in (resource.RLIMIT_DATA, resource.RLIMIT_AS)
        if is_open:
            continue
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))
    # Raise the stack to its hard limit, as contests do: the main stack may then use all memory that
    # the limit on address space allows. Without a limit glibc gives each thread only 2 MB.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
