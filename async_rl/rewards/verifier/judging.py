"""From a program and its tests to verdicts: plans the children to run, reads their output, and
compares it here, outside the jail.

Takes a VerifyRequest, waits for cells, and returns a VerifyResponse, or raises InfrastructureError
if no cell could run the program. Tests run in order; neighbours of one kind share a child. A test
during which the child ends takes its verdict from that; the tests after it run in a fresh child. A
stream test that failed in a shared child runs again in a fresh one, because an earlier run may have
spoilt it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from async_rl.config.rewards import SandboxConfig
from async_rl.core.assert_tests import asked_by
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, AssertTest, CallTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.verifier.answer_process import AnswerProcess
from async_rl.rewards.verifier.asserts import judged_test, take_apart
from async_rl.rewards.verifier.checks import CallCheck, Check, ChildRun
from async_rl.rewards.verifier.comparison import Comparison, load_checker, shorten
from async_rl.rewards.verifier.outcomes import (
    Answers,
    ChildFault,
    read_calls,
    read_judged,
    read_streams,
)
from async_rl.rewards.verifier.packaged_cells import PackagedCells
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.sandbox.cell import CellFailed, Job, Outcome, job_spec
from async_rl.sandbox.protocol import JobSpec, Mode
from async_rl.sandbox.warm_cells import WarmCells

_TRIES = 2
_MAX_STREAMS = 64
_MIB = 1 << 20
_LARGE_BYTES = 1 << 16
"""Output above this size is decoded and compared in a thread."""
T = TypeVar("T")


class Printed(NamedTuple):
    """The result of a program for one standard input; nothing is compared.

    verdict: pass if the program ended well; output: up to the output limit.
    """

    verdict: Verdict
    output: str
    message: str
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A program, its limits, and the cells that run it."""

    code: str
    setup: str
    cells: WarmCells
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    stop: bool

    def job(
        self,
        mode: Mode,
        num_runs: int,
        payload: Any,
        *,
        num_tests: int = 1,
        inputs: Sequence[str] = (),
    ) -> Job:
        spec = job_spec(
            mode,
            num_runs,
            num_tests=num_tests,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_bytes,
            output_bytes=self.output_bytes,
        )
        return Job(spec, payload, [text.encode(errors="replace") for text in inputs])

    async def run(self, job: Job, read: Callable[[Outcome, JobSpec], Answers]) -> ChildRun:
        problem: Exception | None = None
        for _ in range(_TRIES):
            started = time.monotonic()
            try:
                outcome = await self.cells.run(job)
                answers = await _aside(outcome, read, outcome, job.spec)
            except (CellFailed, ChildFault) as error:
                problem = error
                continue
            return ChildRun(
                outcome=outcome,
                answers=answers.answers,
                is_slow=answers.is_slow,
                wall_s=time.monotonic() - started,
                stop=self.stop,
            )
        raise InfrastructureError(
            f"no cell could run the program, tried {_TRIES} times: {problem}"
        ) from problem


class Judge:
    """Verifies programs. packaged: the cells of programs that import packages."""

    def __init__(
        self, cells: WarmCells, config: SandboxConfig, packaged: PackagedCells | None = None
    ) -> None:
        self._config = config
        self._cells = packaged or PackagedCells(cells)
        self._answers = AnswerProcess()
        self._comparison = Comparison(
            relative_tolerance=config.float_tolerance, checker=load_checker(config.checker)
        )

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verdicts of one program. Raises InfrastructureError; cancelling ends the program."""
        program = await self._program(request)
        results: list[TestResult] = []
        failures: list[Verdict] = []
        for kind, tests in groupby(request.tests, key=lambda test: _kind(test, request.setup)):
            results += await self._family(kind, list(tests), program)
            failures = [test.verdict for test in results if test.verdict is not Verdict.PASS]
            if program.stop and failures:
                break
        verdict = failures[0] if failures else Verdict.PASS
        return VerifyResponse(verdict=verdict, tests=results, level=self._cells.level)

    async def run(self, request: VerifyRequest, stdin: str) -> Printed:
        """Run a program on one standard input; the request's tests and setup are not used.

        Raises InfrastructureError; cancelling ends the program.
        """
        program = await self._program(request)
        job = program.job(Mode.STREAMS, 1, program.code, inputs=[stdin])
        child = await program.run(job, read_streams)
        answer = child.answers[0]
        output = child.outcome.outputs[0][: program.output_bytes].decode(errors="replace")
        return Printed(answer.verdict, output, answer.message, child.wall_s)

    async def _program(self, request: VerifyRequest) -> _Program:
        config, stop = self._config, request.stop_at_first_failure
        test_codes = [test.code for test in request.tests if isinstance(test, AssertTest)]
        return _Program(
            code=request.code,
            setup=request.setup,
            cells=await self._cells.cells_for((request.code, request.setup, *test_codes)),
            cpu_s=request.timeout_s or config.timeout_s,
            memory_bytes=(request.memory_mb or config.memory_mb) * _MIB,
            output_bytes=(request.output_kb or config.output_kb) * 1024,
            stop=True if stop is None else stop,
        )

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return self._cells.num_replaced

    async def close(self) -> None:
        """End the process that compares answers."""
        await self._answers.close()

    async def _family(self, kind: str, tests: list[Any], program: _Program) -> list[TestResult]:
        match kind:
            case "answer":
                return await self._until_failure(self._answer, tests, program)
            case "call":
                call_checks = [CallCheck(test, self._comparison) for test in tests]
                return await self._checks(call_checks, program, has_call_names=True)
            case "stdin":
                return await self._streams(tests, program)
            case "assert":
                assertions = [
                    check for test in tests for check in take_apart(test.code, program.setup) or ()
                ]
                return await self._checks(assertions, program, has_call_names=False)
        return await self._until_failure(self._judged, tests, program)

    async def _until_failure(
        self,
        run_test: Callable[[Any, _Program], Awaitable[TestResult]],
        tests: Sequence[Any],
        program: _Program,
    ) -> list[TestResult]:
        results: list[TestResult] = []
        for test in tests:
            results.append(await run_test(test, program))
            if program.stop and results[-1].verdict is not Verdict.PASS:
                break
        return results

    async def _answer(self, test: AnswerTest, program: _Program) -> TestResult:
        started = time.monotonic()
        verdict = await self._answers.verdict(test, program.code, program.cpu_s)
        is_right = verdict is Verdict.PASS
        return TestResult(
            verdict=verdict,
            cpu_s=0,
            wall_s=time.monotonic() - started,
            memory_mb=0,
            message="" if is_right else f"not {shorten(test.expected)} by rule {test.rule}",
        )

    async def _judged(self, test: AssertTest, program: _Program) -> TestResult:
        """Run the test in a judging child, and the program in a solver beside it."""
        fault = asked_by(program.setup, test.code).fault
        if fault:
            return _broken(fault)
        job = program.job(Mode.JUDGE, 1, program.code)
        job = job._replace(test=judged_test(program.setup, test.code))
        return (await program.run(job, read_judged)).judged_result()

    async def _checks(
        self, checks: Sequence[Check], program: _Program, *, has_call_names: bool
    ) -> list[TestResult]:
        """Run checks in order, the calls of as many as possible in one child."""
        results: list[TestResult] = []
        size = len(checks)
        while len(results) < len(checks):
            rest = checks[len(results) : len(results) + size]
            calls = [tuple(call) for check in rest for call in check.calls]
            payload = (program.code, calls, program.stop, has_call_names)
            job = program.job(Mode.CALLS, len(calls), payload, num_tests=len(rest))
            child = await program.run(job, read_calls)
            results += await self._compare(child, child.check_results, rest)
            if child.ends(results):
                break
            if child.is_slow:
                size = 1
        return results

    async def _streams(self, tests: Sequence[StdinTest], program: _Program) -> list[TestResult]:
        results: list[TestResult] = []
        size, is_slow = _MAX_STREAMS, False
        while len(results) < len(tests):
            rest = tests[len(results) : len(results) + size]
            inputs = [test.input for test in rest]
            # A right answer must fit, whatever the limit is.
            largest = max(len(test.output.encode(errors="replace")) for test in rest)
            roomy = replace(program, output_bytes=max(program.output_bytes, 2 * largest))
            num = len(rest)
            job = roomy.job(Mode.STREAMS, num, program.code, num_tests=num, inputs=inputs)
            child = await program.run(job, read_streams)
            compared, has_leftovers = await self._compare(
                child, child.stream_results, rest, self._comparison
            )
            results += compared
            if child.ends(compared):
                break
            is_slow = is_slow or child.is_slow
            size = 1 if has_leftovers or is_slow else _MAX_STREAMS
        return results

    async def _compare(self, child: ChildRun, compare: Callable[..., T], *args: Any) -> T:
        if self._comparison.checker is not None:
            return await asyncio.to_thread(compare, *args)
        return await _aside(child.outcome, compare, *args)


async def _aside(outcome: Outcome, work: Callable[..., T], *args: Any) -> T:
    """The result of `work` on what a child emitted.

    Large output is handled in a thread, so that other programs get their cells.
    """
    num_bytes = sum(map(len, outcome.outputs)) + sum(
        len(frame.body) for frame in outcome.frames.frames
    )
    if num_bytes > _LARGE_BYTES:
        return await asyncio.to_thread(work, *args)
    return work(*args)


def _broken(fault: str) -> TestResult:
    message = f"the test itself is broken: {fault}"
    return TestResult(verdict=Verdict.TEST_ERROR, cpu_s=0, wall_s=0, memory_mb=0, message=message)


def _kind(test: CodeTest, setup: str) -> str:
    match test:
        case AnswerTest():
            return "answer"
        case CallTest():
            return "call"
        case StdinTest():
            return "stdin"
        case AssertTest():
            return "judge" if take_apart(test.code, setup) is None else "assert"
