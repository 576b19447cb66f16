"""A forked child from its first instruction to its last: reads what it is told, locks itself down, runs its part, leaves by os._exit.

Order matters: descriptors and limits first, then capabilities and Landlock, the system call filter last; then nothing can be undone.
Forked by `zygote.py`; never returns.
"""

from __future__ import annotations

import marshal
import math
import os
import resource
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import linux
from .judge import Solver, Test
from .programs import Calls, Streams
from .protocol import FIRST_STREAM, PAYLOAD, RESULT, Mode, Request

if TYPE_CHECKING:
    from .zygote import Jail

_STACK_BYTES = 64 << 20
_MAX_DESCRIPTORS = 256
_MAX_TASKS = 64
FAULT_AT, FAULT_BYTES = 8, 256
"""Where in the shared page a child that could not be locked down says why; before it, one byte per child that could."""


class Part(NamedTuple):
    """One child of a job: its place among the job's children, its payload, the descriptors it keeps, and what it runs with them."""

    place: int
    payload: int
    kept: Sequence[int]
    run: Callable[[Any], int]


def parts(request: Request, descriptors: Sequence[int], pipes: Sequence[int]) -> list[Part]:
    """The children of a job; the last one decides when the job is over. pipes: read and write end of the requests, of the answers."""
    payload, result = descriptors[PAYLOAD], descriptors[RESULT]
    if request.mode == Mode.CALLS:
        return [Part(0, payload, [result], lambda told: Calls(result, request).run(*told))]
    if request.mode == Mode.STREAMS:
        streams = list(descriptors[FIRST_STREAM:])
        return [Part(0, payload, [result, *streams], lambda told: Streams(result, request).run(told, streams))]
    asked, asking, answers, answering = pipes
    return [
        Part(0, payload, [asked, answering], lambda told: Solver(answering, request, asked).run(told)),
        Part(1, descriptors[FIRST_STREAM], [result, asking, answers], lambda told: Test(result, request, asking, answers).run(*told)),
    ]


def main(request: Request, part: Part, jail: Jail) -> None:
    """Lock down, run, leave. The exit status is 0 unless the program chose another one."""
    code = 1
    try:
        told = marshal.loads(os.pread(part.payload, os.fstat(part.payload).st_size, 0))
        try:
            _lock_down(request, part, jail)
        except BaseException as error:
            jail.ready[FAULT_AT : FAULT_AT + FAULT_BYTES] = f"{type(error).__name__}: {error}".encode()[:FAULT_BYTES].ljust(FAULT_BYTES)
            raise
        code = part.run(told)
    finally:
        os._exit(code)


def _lock_down(request: Request, part: Part, jail: Jail) -> None:
    keep = sorted({jail.ruleset, *part.kept, 2} - {-1})
    for low, high in zip(keep, [*keep[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)
    total_s = math.ceil(request.cpu_s * request.num_runs) + 2
    size = request.output_bytes + 1
    _limit(resource.RLIMIT_CPU, total_s)
    _limit(resource.RLIMIT_FSIZE, size)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    if jail.uid >= 0:
        os.setgroups([])
        os.setresgid(jail.uid, jail.uid, jail.uid)
        os.setresuid(jail.uid, jail.uid, jail.uid)
        linux.prctl(linux.PR_SET_PDEATHSIG, 9)
    _limit(resource.RLIMIT_NPROC, _MAX_TASKS)
    _limit(resource.RLIMIT_AS, jail.base_address_space + request.memory_bytes)
    if jail.filter:
        linux.drop_capabilities()
        if jail.ruleset >= 0:
            linux.landlock_restrict(jail.ruleset)
            os.close(jail.ruleset)
        linux.install_seccomp(jail.filter)
    jail.ready[part.place] = 1
    jail.ready.close()


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
