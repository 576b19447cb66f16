"""Runs Python programs in a cell: forks one child per program, or two for a test that runs next to
its program, and watches them.
"""

import builtins
import json
import marshal
import os
import resource
import select
from collections.abc import Sequence
from typing import Any

from . import child, linux, namespaces, seccomp, watch
from .child import Children, Page
from .judge import NAMES, Tests
from .objects import Solver
from .programs import Calls, Checker, Comparer, Streams
from .protocol import (
    LANDLOCK,
    NAMESPACES,
    NOTHING,
    RESULT,
    JobSpec,
    Mode,
    Reply,
)

# nobody: a root server's children at level 2 must not own the files of the host.
_UNPRIVILEGED_UID = 65_534
_STACK_BYTES = 64 << 20
_RUNNERS: dict[int, type[Any]] = {
    Mode.CALLS: Calls,
    Mode.STREAMS: Streams,
    Mode.COMPARE: Comparer,
    Mode.CHECK: Checker,
}


class Jobs:
    """The programs of one cell, one at a time."""

    def __init__(self, level: int, readable: list[str], proc: int) -> None:
        self._level = level
        self._proc = proc
        is_root = level == LANDLOCK and os.geteuid() == 0
        # Not if it could not read the interpreter: then no program would start.
        self._changes_user = is_root and all(map(_is_open_to_others, readable))
        self._seal = [linux.prepare_seccomp(seccomp.build_filter())] if level != NOTHING else []
        self._ruleset = -1
        self._page = Page()
        NAMES.update(vars(builtins))
        # Before any job: a child has the address space of its zygote from its start.
        self._base_address_space = watch.address_space(proc)
        self._confine = self._steps(readable)

    def _steps(self, readable: Sequence[str]) -> list[child.Step]:
        """The steps that give up rights on the paths as they are mounted now."""
        if self._level == NOTHING:
            return []
        if self._level == NAMESPACES:
            self._ruleset = linux.create_ruleset(["/"], namespaces.WRITABLE)
            return linux.prepare_confinement(self._ruleset)
        paths = [*namespaces.SYSTEM, *readable, *namespaces.DEVICES]
        self._ruleset = linux.create_ruleset(paths, [namespaces.NOTHING_KEPT])
        if self._ruleset < 0:
            raise OSError("this kernel has no Landlock")
        # First: without a namespace of processes nothing else ends the child with its zygote.
        die_with_zygote = linux.prepare("prctl", linux.PR_SET_PDEATHSIG, linux.SIGKILL)
        return [die_with_zygote, *linux.prepare_confinement(self._ruleset)]

    def run(self, spec: bytes, descriptors: list[int], host: int) -> Reply:
        """Run one job and leave nothing of it."""
        reply = self._run(JobSpec(*json.loads(spec)), descriptors, host)
        if self._level == NAMESPACES and not namespaces.scratch_is_clean():
            namespaces.renew_scratch()
            if self._ruleset >= 0:
                os.close(self._ruleset)
            # A rule on a directory that a later mount hides does not apply.
            self._confine = self._steps(())
        return reply

    def _run(self, spec: JobSpec, descriptors: list[int], host: int) -> Reply:
        """Fork the job's children, watch the last one, and end all of them.

        The reply has the CPU time of all children and the memory of the largest.
        """
        children = Children(self._page)
        result = descriptors[RESULT]
        pipes = [*os.pipe(), *os.pipe()] if spec.mode == Mode.JUDGE else []
        limits = child.limits_of(
            spec.cpu_s,
            # One byte more, so that an output above the limit can be recognized.
            spec.output_bytes + 1,
            (
                (resource.RLIMIT_STACK, _STACK_BYTES),
                (resource.RLIMIT_AS, self._base_address_space + spec.memory_bytes),
            ),
        )
        parts = _parts(spec, descriptors, pipes)
        processes = [
            children.fork(self._start, number, *part, limits) for number, part in enumerate(parts)
        ]
        for descriptor in (*descriptors, *pipes):
            # A forgotten end of a pipe would turn the crash of one child into a wait of the other.
            if descriptor != result:
                os.close(descriptor)
        poller = select.poll()
        poller.register(host, select.POLLIN)
        poller.register(processes[-1], select.POLLIN)
        try:
            ending = watch.watch(spec, processes, poller, self._proc)
        finally:
            for descriptor in (*processes, result):
                os.close(descriptor)
        # The judging child exits first: it would take its solver's exit for an answer.
        for pid in reversed(children.pids):
            os.kill(pid, linux.SIGKILL)
        while children.collect():
            pass
        return children.reply(ending, len(processes))

    def _start(self, number: int, payload: int, runner: Any, limits: child.Limits) -> None:
        """In a child: lock down and run.

        number: among the job's children; payload: descriptor that it reads; runner: a
        programs.Runner, whose `run` takes the fields of the payload.
        """
        # os.fstat would make twenty objects, most on a page that this process then has to copy.
        loaded = marshal.loads(os.pread(payload, os.lseek(payload, 0, os.SEEK_END), 0))
        if self._changes_user:
            linux.become_user(_UNPRIVILEGED_UID)
        child.lock_down(self._confine, runner.kept, limits, self._seal)
        self._page.set_ready(number)
        runner.run(*loaded)


def _parts(
    spec: JobSpec, descriptors: Sequence[int], pipes: Sequence[int]
) -> list[tuple[int, Any]]:
    """The payload and the runner of each child of a job, which finishes with the last one.

    They are prepared before the fork: an object that is made afterwards costs a child twice as
    much, because it copies each page that it writes. pipes: of two children, read and write end
    of the requests, then of the answers.
    """
    payload, result, *files = descriptors
    if not pipes:
        return [(payload, _RUNNERS[spec.mode](result, spec, files))]
    requests_in, requests_out, answers_in, answers_out = pipes
    solver = Solver(answers_out, spec, [requests_in])
    tests = Tests(result, spec, [requests_out, answers_in])
    return [(payload, solver), (files[0], tests)]


def _is_open_to_others(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & 1:
            return False
        path = os.path.dirname(path)
    return True
