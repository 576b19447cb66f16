"""A forked child from its first instruction to its last: reads its payload, locks itself down, runs
its part, and exits.

Order matters: descriptors and limits first, then capabilities and Landlock, and the system call
filter last; afterwards nothing can be undone.
"""

from __future__ import annotations

import marshal
import math
import mmap
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from resource import setrlimit as set_limit
from typing import NamedTuple

from . import linux
from .checker import Checker
from .comparison import Comparer
from .judge import Solver, Test
from .programs import Calls, Streams
from .protocol import FIRST_STREAM, PAYLOAD, RESULT, JobSpec, Mode

_MAX_TASKS = 64
FAULT_START, FAULT_END = 8, 264
"""Bytes of the shared page for the reason why a child could not be locked down. Before them, the
page has one byte per child, set once the child is locked down.
"""


class Jail(NamedTuple):
    """The steps that lock down each child.

    confine: calls that give up rights first; seal: the filter of system calls, after which nothing
    can be undone; uid: user of the children, -1 to keep the zygote's; ready: page shared with the
    children (see FAULT_START).
    """

    level: int
    ruleset: int
    confine: tuple[Callable[[], None], ...]
    seal: tuple[Callable[[], None], ...]
    uid: int
    hard_limits: Mapping[int, int]
    base_address_space: int
    ready: mmap.mmap
    proc: int


class Part(NamedTuple):
    """One child of a job.

    number: among the job's children; payload, kept: descriptors that it reads and keeps; run: takes
    the fields of the payload and returns the exit status.
    """

    number: int
    payload: int
    kept: Sequence[int]
    run: Callable[..., int]


def parts(spec: JobSpec, descriptors: Sequence[int], pipes: Sequence[int]) -> list[Part]:
    """The children of a job; the job ends with the last one.

    They are prepared before the fork: what is made afterwards costs a child twice as much, because
    it copies each page that it writes. pipes: for Mode.JUDGE, read and write end of the requests,
    then of the answers.
    """
    payload, result = descriptors[PAYLOAD], descriptors[RESULT]
    rest = descriptors[FIRST_STREAM:]
    if spec.mode == Mode.CALLS:
        return [Part(0, payload, [result], Calls(result, spec).run)]
    if spec.mode == Mode.STREAMS:
        return [Part(0, payload, [result, *rest], Streams(result, spec, rest).run)]
    if spec.mode == Mode.COMPARE:
        return [Part(0, payload, [result], Comparer(result, spec).run)]
    if spec.mode == Mode.CHECK:
        return [Part(0, payload, [result, *rest], Checker(result, spec, rest).run)]
    requests_in, requests_out, answers_in, answers_out = pipes
    solver = Solver(answers_out, spec, requests_in)
    test = Test(result, spec, requests_out, answers_in)
    return [
        Part(0, payload, [requests_in, answers_out], solver.run),
        Part(1, rest[0], [result, requests_out, answers_in], test.run),
    ]


def limits(spec: JobSpec, jail: Jail) -> list[tuple[int, tuple[int, int]]]:
    """Arguments of setrlimit for the children of a job."""
    wanted = (
        (resource.RLIMIT_CPU, math.ceil(spec.cpu_s) + 2),
        (resource.RLIMIT_FSIZE, spec.output_bytes + 1),
        (resource.RLIMIT_NPROC, _MAX_TASKS),
        (resource.RLIMIT_AS, jail.base_address_space + spec.memory_bytes),
    )
    lowered = [(kind, min(value, jail.hard_limits[kind])) for kind, value in wanted]
    return [(kind, (value, value)) for kind, value in lowered]


def main(part: Part, limits: Sequence[tuple[int, tuple[int, int]]], jail: Jail) -> None:
    """Lock down, run, exit. The exit status is 0 unless the program chose another one."""
    code = 1
    try:
        # os.fstat would make twenty objects, most on a page that this process then has to copy.
        loaded = marshal.loads(os.pread(part.payload, os.lseek(part.payload, 0, os.SEEK_END), 0))
        try:
            _lock_down(part, limits, jail)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".encode()
            length = FAULT_END - FAULT_START
            jail.ready[FAULT_START:FAULT_END] = reason[:length].ljust(length)
            raise
        code = part.run(*loaded)
    finally:
        os._exit(code)


def _lock_down(part: Part, limits: Sequence[tuple[int, tuple[int, int]]], jail: Jail) -> None:
    if jail.uid >= 0:
        os.setgroups([])
        os.setresgid(jail.uid, jail.uid, jail.uid)
        os.setresuid(jail.uid, jail.uid, jail.uid)
    for give_up in jail.confine:
        give_up()
    linux.close_all_except(part.kept)
    for kind, pair in limits:
        set_limit(kind, pair)
    for give_up in jail.seal:
        give_up()
    jail.ready[part.number] = 1
    jail.ready.close()
