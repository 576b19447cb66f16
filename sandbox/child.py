"""A forked child from its first instruction to its last: reads what it is told, locks itself down,
runs its part, leaves by os._exit.

Order matters: descriptors and limits first, then capabilities and Landlock, the system call filter
last; then nothing can be undone. Forked by `zygote.py`; never returns.
"""

from __future__ import annotations

import marshal
import math
import os
import resource
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .judge import Solver, Test
from .programs import Calls, Streams
from .protocol import FIRST_STREAM, PAYLOAD, RESULT, Mode, Request

if TYPE_CHECKING:
    from .zygote import Jail

_MAX_TASKS = 64
FAULT_AT, FAULT_BYTES = 8, 256
"""Where in the shared page a child that could not be locked down says why; before it, one byte per
child that could.
"""


class Part(NamedTuple):
    """One child of a job: its place among the job's children, its payload, the descriptors it
    keeps, and what it runs with them.
    """

    place: int
    payload: int
    kept: Sequence[int]
    run: Callable[[Any], int]


def parts(request: Request, descriptors: Sequence[int], pipes: Sequence[int]) -> list[Part]:
    """The children of a job; the last one decides when the job is over. pipes: read and write end
    of the requests, of the answers.
    """
    payload, result = descriptors[PAYLOAD], descriptors[RESULT]
    if request.mode == Mode.CALLS:
        return [Part(0, payload, [result], lambda told: Calls(result, request).run(*told))]
    if request.mode == Mode.STREAMS:
        streams = list(descriptors[FIRST_STREAM:])
        return [
            Part(
                0,
                payload,
                [result, *streams],
                lambda told: Streams(result, request).run(told, streams),
            )
        ]
    asked, asking, answers, answering = pipes
    return [
        Part(
            0, payload, [asked, answering], lambda told: Solver(answering, request, asked).run(told)
        ),
        Part(
            1,
            descriptors[FIRST_STREAM],
            [result, asking, answers],
            lambda told: Test(result, request, asking, answers).run(*told),
        ),
    ]


def main(request: Request, part: Part, jail: Jail) -> None:
    """Lock down, run, leave. The exit status is 0 unless the program chose another one."""
    code = 1
    try:
        told = marshal.loads(os.pread(part.payload, os.fstat(part.payload).st_size, 0))
        try:
            _lock_down(request, part, jail)
        except BaseException as error:
            jail.ready[FAULT_AT : FAULT_AT + FAULT_BYTES] = (
                f"{type(error).__name__}: {error}".encode()[:FAULT_BYTES].ljust(FAULT_BYTES)
            )
            raise
        code = part.run(told)
    finally:
        os._exit(code)


def _lock_down(request: Request, part: Part, jail: Jail) -> None:
    if jail.uid >= 0:
        os.setgroups([])
        os.setresgid(jail.uid, jail.uid, jail.uid)
        os.setresuid(jail.uid, jail.uid, jail.uid)
    for give_up in jail.confine:
        give_up()
    lowest = 2
    for keep in sorted(part.kept):
        os.closerange(lowest + 1, keep)
        lowest = keep
    os.closerange(lowest + 1, 1 << 20)
    for which, value in (
        (resource.RLIMIT_CPU, math.ceil(request.cpu_s * request.num_runs) + 2),
        (resource.RLIMIT_FSIZE, request.output_bytes + 1),
        (resource.RLIMIT_NPROC, _MAX_TASKS),
        (resource.RLIMIT_AS, jail.base_address_space + request.memory_bytes),
    ):
        limit = min(value, jail.hard_limits[which])
        resource.setrlimit(which, (limit, limit))
    for give_up in jail.seal:
        give_up()
    jail.ready[part.place] = 1
    jail.ready.close()
