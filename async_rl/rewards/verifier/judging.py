"""From a program and its tests to verdicts: plans the children to run, reads their output, and
decides outside the process that ran the program (`rulings.py`).

Takes a VerifyRequest, waits for cells, and returns a VerifyResponse, or raises InfrastructureError
if no cell could run the program. Tests run in order; neighbours of one kind share a child. A test
during which the child exits takes its verdict from that; the tests after it run in a fresh child. A
stream test that failed in a shared child runs again in a fresh one, because an earlier run may have
spoilt it. After two timeouts the rest of the tests count as timeouts (`checks.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from async_rl.config.rewards import OUTPUT_KB, SandboxConfig
from async_rl.core.assert_tests import asked_by
from async_rl.core.errors import Unsupported
from async_rl.core.languages import PYTHON, Language
from async_rl.core.types import (
    AnswerTest,
    AssertTest,
    CallTest,
    CodeTest,
    ContainerTest,
    StdinTest,
    Verdict,
)
from async_rl.rewards.verifier.answer_process import AnswerProcess
from async_rl.rewards.verifier.asserts import FunctionCall, judged_test, take_apart
from async_rl.rewards.verifier.checks import Check, Ruling, is_decided, with_rest
from async_rl.rewards.verifier.command_judging import CommandJudge
from async_rl.rewards.verifier.container_run import judge_contained
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.outcomes import read_calls, read_judged, read_streams
from async_rl.rewards.verifier.packaged_cells import PackagedCells
from async_rl.rewards.verifier.program import Program
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.rewards.verifier.rulings import Rulings, TooLarge
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import Mode

_MAX_STREAMS = 64
_MIB = 1 << 20


class Printed(NamedTuple):
    """The result of a program for one standard input; nothing is compared.

    verdict: pass if the program exited well; output: up to the output limit.
    """

    verdict: Verdict
    output: str
    message: str
    wall_s: float


class Judge:
    """Verifies programs. packaged: the cells of programs that import packages; commands: judges
    other languages than Python, None to refuse them; containers: None to refuse their tests.
    """

    def __init__(
        self,
        cells: Cells,
        config: SandboxConfig,
        packaged: PackagedCells | None = None,
        commands: CommandJudge | None = None,
        containers: Containers | None = None,
    ) -> None:
        self._config, self._containers = config, containers
        self._cells = packaged or PackagedCells(cells)
        self._answers = AnswerProcess()
        self._commands = commands
        self._rulings = Rulings(config, commands)

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verdicts of one program. Raises InfrastructureError; cancelling ends the program."""
        program = await self._program(request)
        if request.is_command:
            return await self._judge_of(request.language).verify(
                request, self._config, partial(self._rulings.of_output, program=program)
            )
        results: list[TestResult] = []
        for kind, neighbours in groupby(request.tests, key=lambda test: _kind(test, request.setup)):
            tests = list(neighbours)
            if is_decided(results, stop=program.stop):
                results = with_rest(results, len(results) + len(tests), stop=program.stop)
            else:
                results += await self._family(kind, tests, program)
        failures = [test.verdict for test in results if test.verdict is not Verdict.PASS]
        verdict = failures[0] if failures else Verdict.PASS
        return VerifyResponse(verdict=verdict, tests=results, level=self._cells.level)

    async def run(self, request: VerifyRequest, stdin: str) -> Printed:
        """Run a program on one standard input; the request's tests and setup are not used.

        Raises InfrastructureError; cancelling ends the program.
        """
        if request.language != PYTHON:
            ran = await self._judge_of(request.language).run(request, stdin, self._config)
            output = ran.output.decode(errors="replace")
            return Printed(ran.verdict, output, ran.message, ran.wall_s)
        program = await self._program(request)
        job = program.job(Mode.STREAMS, 1, (program.code,), inputs=[stdin.encode(errors="replace")])
        child = await program.run(job, read_streams)
        answer = child.answers[0]
        output = child.outcome.outputs[0][: program.output_bytes].decode(errors="replace")
        return Printed(answer.verdict, output, answer.message, child.wall_s)

    async def _program(self, request: VerifyRequest) -> Program:
        config, stop = self._config, request.stop_at_first_failure
        test_codes = [test.code for test in request.tests if isinstance(test, AssertTest)]
        return Program(
            code=request.code,
            setup=request.setup,
            cells=await self._cells.cells_for((request.code, request.setup, *test_codes)),
            cpu_s=request.timeout_s or config.timeout_s,
            memory_bytes=(request.memory_mb or config.memory_mb) * _MIB,
            output_bytes=(request.output_kb or OUTPUT_KB) * 1024,
            stop=True if stop is None else stop,
        )

    async def require(self, request: VerifyRequest) -> None:
        """Raise Unsupported if such programs cannot be judged on this machine."""
        if request.is_command:
            await self._judge_of(request.language).require(request.language)
        for test in request.tests:
            if isinstance(test, ContainerTest):
                await self._with_containers().require(test.image)

    def _with_containers(self) -> Containers:
        if self._containers is None:
            raise Unsupported("tests in containers are not judged here")
        return self._containers

    def _judge_of(self, language: Language) -> CommandJudge:
        if self._commands is None:
            raise Unsupported(f"programs in {language} are not judged here, only Python")
        return self._commands

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        num_commands = self._commands.num_replaced if self._commands else 0
        return self._cells.num_replaced + num_commands

    async def close(self) -> None:
        """End the process that compares answers, the cells of other languages, and containers."""
        await self._answers.close()
        for part in (self._commands, self._containers):
            if part is not None:
                await part.close()

    async def _family(self, kind: str, tests: list[Any], program: Program) -> list[TestResult]:
        match kind:
            case "answer":
                return await self._until_failure(self._answer, tests, program)
            case "container":
                return await self._until_failure(self._contained, tests, program)
            case "call":
                checks = [self._call_check(test, program) for test in tests]
                return await self._checks(checks, program, has_call_names=True)
            case "stdin":
                return await self._streams(tests, program)
            case "assert":
                assertions = [
                    Check(assertion.calls, partial(self._rulings.of_assertion, assertion))
                    for test in tests
                    for assertion in take_apart(test.code, program.setup) or ()
                ]
                try:
                    return await self._checks(assertions, program, has_call_names=False)
                except TooLarge:
                    # A judge process compares in a cell, with the program's limits.
                    return await self._until_failure(self._judged, tests, program)
        return await self._until_failure(self._judged, tests, program)

    def _call_check(self, test: CallTest, program: Program) -> Check:
        def rule(values: list[bytes]) -> Awaitable[Ruling]:
            return self._rulings.of_value(test, values[0], program)

        return Check([FunctionCall(test.function, test.args, {})], rule)

    async def _until_failure(
        self,
        run_test: Callable[[Any, Program], Awaitable[TestResult]],
        tests: Sequence[Any],
        program: Program,
    ) -> list[TestResult]:
        results: list[TestResult] = []
        for test in tests:
            results.append(await run_test(test, program))
            if is_decided(results, stop=program.stop):
                break
        return with_rest(results, len(tests), stop=program.stop)

    async def _answer(self, test: AnswerTest, program: Program) -> TestResult:
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

    def _contained(self, test: ContainerTest, program: Program) -> Awaitable[TestResult]:
        rule = partial(self._rulings.of_output, program=program)
        containers = self._with_containers()
        return judge_contained(containers, test, program.code, program.output_bytes, rule)

    async def _judged(self, test: AssertTest, program: Program) -> TestResult:
        """Run the test in a judging child, and the program in a solver next to it."""
        fault = asked_by(program.setup, test.code).fault
        if fault:
            return _broken(fault)
        job = program.job(Mode.JUDGE, 1, (program.code,))
        job = job._replace(test=judged_test(program.setup, test.code))
        return (await program.run(job, read_judged)).judged_result()

    async def _checks(
        self, checks: Sequence[Check], program: Program, *, has_call_names: bool
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
            results += await child.check_results(rest)
            if is_decided(results, stop=program.stop):
                break
            if child.is_slow:
                size = 1
        return with_rest(results, len(checks), stop=program.stop)

    async def _streams(self, tests: Sequence[StdinTest], program: Program) -> list[TestResult]:
        def rule(test: StdinTest, output: bytes) -> Awaitable[Ruling]:
            return self._rulings.of_output(test, output, program)

        results: list[TestResult] = []
        size, is_slow = _MAX_STREAMS, False
        while len(results) < len(tests):
            rest = tests[len(results) : len(results) + size]
            inputs = [test.input.encode(errors="replace") for test in rest]
            # A right answer must fit, whatever the limit is.
            largest = max(len(test.output.encode(errors="replace")) for test in rest)
            roomy = replace(program, output_bytes=max(program.output_bytes, 2 * largest))
            num = len(rest)
            job = roomy.job(Mode.STREAMS, num, (program.code,), num_tests=num, inputs=inputs)
            child = await program.run(job, read_streams)
            compared, has_leftovers = await child.stream_results(rest, rule)
            results += compared
            if is_decided(results, stop=program.stop):
                break
            is_slow = is_slow or child.is_slow
            size = 1 if has_leftovers or is_slow else _MAX_STREAMS
        return with_rest(results, len(tests), stop=program.stop)


def _broken(fault: str) -> TestResult:
    message = f"the test itself is broken: {fault}"
    return TestResult(verdict=Verdict.TEST_ERROR, cpu_s=0, wall_s=0, memory_mb=0, message=message)


def _kind(test: CodeTest, setup: str) -> str:
    match test:
        case AnswerTest():
            return "answer"
        case CallTest():
            return "call"
        case ContainerTest():
            return "container"
        case StdinTest():
            return "stdin"
        case AssertTest():
            return "judge" if take_apart(test.code, setup) is None else "assert"
