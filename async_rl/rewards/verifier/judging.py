"""From a program and its tests to verdicts: plans the children to run, reads their output, and
decides outside the process that ran the program (`rulings.py`).

Takes a VerifyRequest, waits for cells, and returns a VerifyResponse, or raises InfrastructureError
if no cell could run the program. Tests run in order; neighbors of one kind share a child. A test
during which the child exits takes its verdict from that; the tests after it run in a fresh child. A
stream test that failed in a shared child runs again in a fresh child, because an earlier run may
have spoilt it. After two timeouts the rest of the tests count as timeouts (`program.py`).

A cell with numpy takes twice the time to start and more memory to fork than a plain cell, so only
programs that name a package of `sandbox.packages` use it. The scan looks for the package's name as
a word in the program and its tests. A name in a comment costs a little time; a program that builds
the name at run time cannot import the package.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

from async_rl.config.rewards import SandboxConfig
from async_rl.core.assert_tests import asked_by
from async_rl.core.errors import ConfigError, Unsupported
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
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.asserts import Call, calls_of
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.container_run import judge_contained
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.outcomes import Ran, Ruling, result_of
from async_rl.rewards.verifier.program import Limits, Program, Question, Rule
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.rewards.verifier.rulings import Rulings
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import Mode


class Judge:
    """Verifies programs. num_packaged: cells with `sandbox.packages`, which start when a program
    needs them; commands: judges other languages than Python, None to refuse them; containers: None
    to refuse their tests. Raises ConfigError if a package is not installed.
    """

    def __init__(
        self,
        cells: Cells,
        config: SandboxConfig,
        *,
        num_packaged: int = 1,
        commands: CommandJudge | None = None,
        containers: Containers | None = None,
    ) -> None:
        self._cells, self._config, self._containers = cells, config, containers
        self._packaged: Cells | None = None
        if config.packages:
            try:
                self._packaged = Cells.of_programs(num_packaged, cells.level, config.packages)
            except CellFailed as error:
                raise ConfigError(str(error)) from error
        self._package = re.compile(rf"\b(?:{'|'.join(map(re.escape, config.packages))})\b")
        # A process, because the text is the policy's, and parsing it may take any time.
        self._words = TextProcess()
        self._commands = commands
        self._rulings = Rulings(config, commands)

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verdicts of one program. Raises InfrastructureError; cancelling stops the program."""
        program = self._program(request)
        if request.is_command:
            judge = self._judge_of(request.language)
            return self._response(await judge.results(request, program, self._rule(program)))
        results: list[TestResult] = []
        rule = self._rule(program)
        planned = [(*_plan(test, request.setup), test) for test in request.tests]
        for (mode, _), neighbors in groupby(planned, key=itemgetter(0, 1)):
            if mode is None:
                for *_, test in neighbors:
                    if not program.is_decided(results):
                        results.append(await self._alone(test, program))
            elif not program.is_decided(results):
                questions = [each[2] for each in neighbors]
                results += await program.results(mode, questions, rule)
        return self._response(program.with_rest(results, len(request.tests)))

    def _response(self, results: list[TestResult]) -> VerifyResponse:
        """The response: its verdict is the verdict of the first failure."""
        failures = (result.verdict for result in results if result.verdict is not Verdict.PASS)
        verdict = next(failures, Verdict.PASS)
        return VerifyResponse(verdict=verdict, tests=results, level=self._cells.level)

    async def run(self, request: VerifyRequest, stdin: str) -> Ran:
        """Run a program on one standard input; the request's tests and setup are not used.

        Raises InfrastructureError; cancelling stops the program.
        """
        program, inputs = self._program(request), [stdin.encode(errors="replace")]
        if request.language != PYTHON:
            return await self._judge_of(request.language).run(request, stdin, program.limits)
        child = await program.run(Mode.STREAMS, program.code, inputs=inputs)
        result = child.result(child.ruling, child.outcome.reply.cpu_s)
        return result, child.outcome.outputs[0][: program.limits.output_bytes]

    def _program(self, request: VerifyRequest) -> Program:
        cells = self._cells
        if self._packaged is not None:
            codes = [test.code for test in request.tests if isinstance(test, AssertTest)]
            # The text decides, without running it: a false match only costs the start of the other
            # cell.
            if any(map(self._package.search, (request.code, request.setup, *codes))):
                cells = self._packaged
        return Program(
            code=request.code,
            setup=request.setup,
            cells=cells,
            limits=Limits.of(request, self._config),
            # The first failure decides unless the request says otherwise.
            stop=request.stop_at_first_failure is not False,
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
        num_packaged = self._packaged.num_replaced if self._packaged else 0
        return self._cells.num_replaced + num_packaged + num_commands

    async def close(self) -> None:
        """End all that the judge has started. The plain cells belong to the caller."""
        for part in (self._words, self._packaged, self._commands, self._containers):
            if part is not None:
                await part.close()

    def _rule(self, program: Program) -> Rule:
        return partial(self._rulings.of, program=program)

    async def _alone(self, test: CodeTest, program: Program) -> TestResult:
        """The result of a test that shares no child with others."""
        match test:
            case AnswerTest():
                return await self._answer(test, program)
            case ContainerTest():
                containers, limit = self._with_containers(), program.limits.output_bytes
                rule = self._rule(program)
                return await judge_contained(containers, test, program.code, limit, rule)
        assert isinstance(test, AssertTest)
        # Before a cell is used: such a test would fail or pass every program.
        fault = asked_by(program.setup, test.code, test.own).fault
        return result_of(Ruling(Verdict.TEST_ERROR, f"the test itself is broken: {fault}"))

    async def _answer(self, test: AnswerTest, program: Program) -> TestResult:
        started = time.monotonic()
        verdict = await self._words.verdict(test, program.code, program.limits.cpu_s)
        is_right = verdict is Verdict.PASS
        message = "" if is_right else f"not {shorten(test.expected)} by rule {test.rule}"
        return result_of(Ruling(verdict, message), wall_s=time.monotonic() - started)


def _plan(test: CodeTest, setup: str) -> tuple[Mode | None, bool, Sequence[Question]]:
    """How a test runs, whether as an assert statement, and its questions; None for a test that
    shares no child.
    """
    match test:
        case CallTest():
            return Mode.CALLS, False, [Call.of(test)]
        case StdinTest():
            return Mode.STREAMS, False, [test]
        case AssertTest() if not asked_by(setup, test.code, test.own).fault:
            calls = calls_of(setup, test.code, test.own)
            return (Mode.CALLS, True, calls) if calls else (Mode.JUDGE, True, [test])
    return None, False, []
