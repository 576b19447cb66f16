"""One command in a container, from its files to its verdict.

Its limits hold for all its processes together, as the host's /proc counts them: CPU time, memory,
and sleep. The output is compared outside the container, as for other programs (`judging.py`).
"""

import asyncio
import os
import secrets
import signal
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import psutil

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import ContainerTest, Verdict
from async_rl.rewards.verifier.containers import PID, REPORT, Containers
from async_rl.rewards.verifier.outcomes import MIB, Ruling, ended, printable, result_of, too_much
from async_rl.rewards.verifier.program import Limits, Rule
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import Ending, JobSpec, Mode, Reply
from async_rl.sandbox.watch import Budget, ProcessTree, Usage, open_proc

# The most that a command may print if that is not compared.
_PRINTED_BYTES = 4 << 20
# Thousands of cases; the parser takes time in proportion.
_MAX_REPORT_BYTES = 4 << 20
_MESSAGE_CHARS = 300
_PIECE = 1 << 16
# A look lists the whole /proc, and many containers may run.
_TICK_S = 0.05
# A command whose processes hide their CPU time is stopped after this many times its limit and
# these seconds more, in which the engine starts.
_PATIENCE = 4
_START_S = 60.0
# Statuses of an engine whose container has not started since the command is not in the image.
_NO_COMMAND = (126, 127)
_STDIN = "stdin"
_NAMED = 3


async def judge_contained(
    containers: Containers, test: ContainerTest, code: str, limits: Limits, rule: Rule
) -> TestResult:
    """The result of a test. rule: decides about its output. Raises InfrastructureError."""
    async with containers.place(test.image) as folder:
        proc = open_proc()
        try:
            run = _Run(test, folder, limits, proc)
            await asyncio.to_thread(run.write_files, code)
            reply = await run.watch(containers)
        finally:
            os.close(proc)
        return result_of(await run.ruling(reply, rule), reply)


async def _keep(stream: asyncio.StreamReader, kept: bytearray, most: int) -> None:
    """Keep the first bytes, and read to the end: an engine that cannot write does not end."""
    while piece := await stream.read(_PIECE):
        kept.extend(piece[: most - len(kept)])


class _Run:
    """A command with its limits, and the reason why it stopped."""

    def __init__(self, test: ContainerTest, folder: Path, limits: Limits, proc: int) -> None:
        self._test = test
        self._folder = folder
        self._limit = _PRINTED_BYTES
        if test.prints is not None:
            self._limit = limits.with_output_of([test.prints]).output_bytes
        self._output = bytearray()
        self._errors = bytearray()
        self._spec = JobSpec(Mode.STREAMS, 1, test.timeout_s, test.memory_mb * MIB, self._limit)
        self._proc = proc
        self._tree: ProcessTree | None = None
        patience_s = _PATIENCE * test.timeout_s + _START_S
        self._budget = Budget(self._spec, proc, self._usage, patience_s)

    def write_files(self, code: str) -> None:
        """Write the files of the container. Only the report is writable, by any user."""
        test = self._test
        given = test.prints.input if test.prints is not None else ""
        texts = {str(index): text for index, text in enumerate((code, *test.files.values()))}
        for name, text in {**texts, _STDIN: given, REPORT: ""}.items():
            file = self._folder / name
            file.write_text(text, encoding="utf-8", errors="replace")
            # The command of a root server's container runs as another user.
            file.chmod(0o666 if name == REPORT else 0o444)

    async def watch(self, containers: Containers) -> Reply:
        """Run the command to its end or to a limit. Cancelling stops it."""
        name = f"async-rl-{secrets.token_hex(8)}"
        started = time.monotonic()
        stdin = os.open(self._folder / _STDIN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            process = await asyncio.create_subprocess_exec(
                *containers.command(name, self._test, self._folder),
                stdin=stdin,
                stdout=PIPE,
                stderr=PIPE,
            )
        finally:
            os.close(stdin)
        ending = Ending.EXITED
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.TaskGroup() as group:
                output = _keep(process.stdout, self._output, self._limit + 1)
                group.create_task(output, name="output")
                errors = _keep(process.stderr, self._errors, _PRINTED_BYTES + 1)
                group.create_task(errors, name="errors")
                exited = group.create_task(process.wait(), name="end of a container")
                limits = group.create_task(self._exceeded(), name="limits of a container")
                await asyncio.wait((limits, exited), return_when=asyncio.FIRST_COMPLETED)
                # An exit that arrives together with a limit counts as an exit.
                if exited.done():
                    limits.cancel()
                else:
                    ending = limits.result()
                    containers.remove(name, process)
        finally:
            if process.returncode is None:
                containers.remove(name, process)
        wall_s = time.monotonic() - started
        status = process.returncode or 0
        code = signal.SIGKILL if ending == Ending.SIGNALED else status
        used = self._budget
        return Reply(ending, code, used.cpu_s, wall_s, used.memory_bytes)

    async def _exceeded(self) -> Ending:
        """Wait for a limit that the command exceeds, in steps: nothing reports such usage."""
        budget = self._budget
        while True:
            await asyncio.sleep(_TICK_S)
            if len(self._output) > self._limit or len(self._errors) > _PRINTED_BYTES:
                return Ending.EXITED
            ending = await asyncio.to_thread(budget.exceeded, _TICK_S)
            if budget.memory_bytes > self._spec.memory_bytes:
                return Ending.SIGNALED
            if ending is not None:
                return ending

    def _usage(self, elapsed_s: float) -> Usage:
        """Usage of the processes of the container; none before it has started.

        Its first process is the only child of the engine's monitor, and inherits every orphan.
        """
        if self._tree is None:
            try:
                first = psutil.Process(int((self._folder / PID).read_text()))
                self._tree = ProcessTree(self._proc, first.ppid())
            except (OSError, ValueError, psutil.Error):
                return Usage(0.0, 0, 0.0)
        return self._tree.use_of_all(elapsed_s)

    async def ruling(self, reply: Reply, rule: Rule) -> Ruling:
        """The ruling on the test. Raises InfrastructureError if the command never ran."""
        test = self._test
        if len(self._output) > self._limit:
            return too_much("printed", self._limit)
        if len(self._errors) > _PRINTED_BYTES:
            return too_much("printed on standard error", _PRINTED_BYTES)
        if reply.ending != Ending.EXITED:
            return ended(reply, self._spec)
        # The engine writes it when the command starts: no program can remove it.
        if not await asyncio.to_thread((self._folder / PID).exists):
            reason = self._said()
            if reply.code in _NO_COMMAND:
                return Ruling(Verdict.TEST_ERROR, f"no such command in {test.image}: {reason}")
            raise InfrastructureError(f"a container of {test.image} did not start: {reason}")
        # Before the status: pytest exits with 1 for tests that must fail.
        if test.report is not None:
            reason = await asyncio.to_thread(self._report_failure)
            return Ruling(Verdict.WRONG_ANSWER if reason else Verdict.PASS, reason)
        if reply.code:
            verdict = Verdict.WRONG_ANSWER if test.prints is None else Verdict.RUNTIME_ERROR
            left = f"exited with status {reply.code}: {self._said()}"
            return Ruling(verdict, left.rstrip(": "))
        if test.prints is None:
            return Ruling(Verdict.PASS)
        return await rule(test.prints, bytes(self._output))

    def _report_failure(self) -> str:
        with open(self._folder / REPORT, "rb") as file:
            report = file.read(_MAX_REPORT_BYTES + 1)
        if len(report) > _MAX_REPORT_BYTES:
            return f"the report has more than {_MAX_REPORT_BYTES >> 20} MB"
        if not report:
            return f"the command wrote no report: {self._said()}"
        return failure_of_report(report, self._test.passing, self._test.failing)

    def _said(self) -> str:
        """The end of the command's error output, with standard output unless that is the answer."""
        printed = self._output if self._test.prints is None else b""
        return printable(bytes(printed + self._errors)[-_MESSAGE_CHARS:], _MESSAGE_CHARS)


def _refuse(*_: object) -> None:
    raise ValueError("it has a document type")


def failure_of_report(report: bytes, passing: Sequence[str], failing: Sequence[str]) -> str:
    """The reason why a JUnit report shows a wrong program (pytest's --junitxml, and many others);
    empty if the program is right.

    The report is hostile; reading takes time in proportion to its bytes. passing: cases that must
    pass, empty for all, at least one; failing: cases that must fail.
    """
    passed = set()
    failed = set()
    try:
        # A document type declares entities, which could expand without end.
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = _refuse
        parser.Parse(report, True)
        for case in ElementTree.fromstring(report).iter("testcase"):
            group = case.get("classname", "")
            name = case.get("name", "")
            name = f"{group}.{name}" if group else name
            outcomes = {part.tag for part in case}
            if outcomes & {"failure", "error"}:
                failed.add(name)
            elif "skipped" not in outcomes:
                passed.add(name)
    # ElementTree reads everything that expat has read: it has the same parser.
    except (expat.ExpatError, LookupError, ValueError) as error:
        return f"the report cannot be read: {error}"
    # A name may stand for several cases.
    passed -= failed
    missed = set(passing) - passed
    if not passing:
        missed = failed - set(failing)
        if not missed and not passed:
            return "no test of the report passed"
    if missed:
        return f"{len(missed)} of the tests did not pass: {shorten(sorted(missed)[:_NAMED])}"
    forged = set(failing) - failed
    if forged:
        return f"tests that must fail did not: {shorten(sorted(forged)[:_NAMED])}"
    return ""
