"""The system calls of commands: native programs and the runtimes of other languages, and tools that
start other programs.

Both lists extend that of Python programs (`seccomp.py`). Invariants: no network, ptrace, mount,
namespace, memfd or io_uring in either; shared anonymous memory is refused, because no limit on a
process counts it; a PROGRAM can signal only itself, and start nothing (its one execveat is counted
by `one_exec.py`).
"""

from __future__ import annotations

import struct

from .command_protocol import Profile
from .one_exec import EXECVEAT
from .seccomp import ALLOWED, CONDITIONAL, Conditional, build_filter, high, low

_PROGRAM_CALLS = {
    "fallocate": 285, "msync": 26, "sched_getscheduler": 145, "sched_get_priority_max": 146,
    "sched_get_priority_min": 147, "epoll_create": 213, "eventfd": 284, "membarrier": 324,
    "epoll_pwait2": 441,
}  # fmt: skip
_TOOL_CALLS = {
    "fork": 57, "vfork": 58, "execve": 59, "wait4": 61, "waitid": 247, "kill": 62, "tgkill": 234,
    "setpgid": 109, "setsid": 112, "link": 86, "symlink": 88, "linkat": 265, "symlinkat": 266,
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "utimensat": 280, "utime": 132, "flock": 73,
}  # fmt: skip
_NAMESPACE_FLAGS = 0x7E020000
_GO_THREAD_FLAGS, _SET_TLS = 0x00050F00, 0x00080000
_MAP_KIND, _MAP_SHARED, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 1, 2, 0x20
_ARCH_SET_FS = 0x1002
_PR_SET_NAME, _PR_SET_VMA = 15, 0x53564D41
_AT_EMPTY_PATH = 0x1000
_OWN_PID = 0x7F3A91C5
"""Stands for the number of the process, which is known only after the fork."""
_LOCKS = (5, 6, 7, 36, 37, 38)

_PROGRAM: dict[str, Conditional] = {
    **CONDITIONAL,
    "mmap": (
        9,
        [
            [low(3, _MAP_PRIVATE, _MAP_KIND)],
            [low(3, _MAP_SHARED, _MAP_KIND | _MAP_ANONYMOUS)],
        ],
    ),
    "arch_prctl": (158, [[low(0, _ARCH_SET_FS)]]),
    "prctl": (157, [[low(0, _PR_SET_NAME)], [low(0, _PR_SET_VMA)]]),
    "clone": (56, [*CONDITIONAL["clone"][1], [low(0, _GO_THREAD_FLAGS, 0xFFFFFFFF & ~_SET_TLS)]]),
    "tgkill": (234, [[low(0, _OWN_PID), high(0, 0)]]),
    "execveat": (EXECVEAT, [[low(4, _AT_EMPTY_PATH)]]),
}
_TOOLS: dict[str, Conditional] = {
    **_PROGRAM,
    "clone": (56, [[low(0, 0, _NAMESPACE_FLAGS)]]),
    "fcntl": (72, [*CONDITIONAL["fcntl"][1], *([low(1, command)] for command in _LOCKS)]),
    # rustc starts its linker with a pair of sequenced packets
    "socketpair": (53, [*CONDITIONAL["socketpair"][1], [low(0, 1), low(1, 5, 0xF)]]),
}


def build(profile: int) -> bytes:
    """The filter of a profile. Give it to `of_process` before use."""
    if profile == Profile.TOOLS:
        allowed = {**ALLOWED, **_PROGRAM_CALLS, **_TOOL_CALLS}
        conditional = {name: _TOOLS[name] for name in _TOOLS if name != "tgkill"}
    else:
        allowed, conditional = {**ALLOWED, **_PROGRAM_CALLS}, _PROGRAM
    allowed = {name: allowed[name] for name in allowed if name not in conditional}
    return build_filter(allowed, conditional)


def of_process(program: bytes, pid: int) -> bytes:
    """The filter of the process with this number."""
    return program.replace(struct.pack("=I", _OWN_PID), struct.pack("=I", pid))
