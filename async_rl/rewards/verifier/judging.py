"""From a program and its tests to verdicts: plans the children to run, reads their output, and
decides outside the process that ran the program: here if its output is small, otherwise in a cell.

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

import keyword
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter

import msgspec

from async_rl.config.rewards import SandboxConfig
from async_rl.core.assert_tests import Call, asked_by, names_asked
from async_rl.core.errors import ConfigError, Unsupported
from async_rl.core.programs import PYTHON, Checker
from async_rl.core.types import (
    AnswerTest,
    AssertTest,
    CallTest,
    CodeProblem,
    CodeTest,
    ContainerTest,
    StdinTest,
    Verdict,
)
from async_rl.rewards.text_process import TextProcess
from async_rl.rewards.verifier.commands import CommandJudge, load_headers
from async_rl.rewards.verifier.container_run import judge_contained
from async_rl.rewards.verifier.containers import Containers
from async_rl.rewards.verifier.outcomes import Ran, Ruling, rejected, result_of
from async_rl.rewards.verifier.program import (
    MOST_TESTS,
    Ask,
    Limits,
    Program,
    Question,
    Rule,
    Run,
    interacted,
    ran_of,
    tried,
)
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.sandbox.cell import CellFailed
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.comparison import Printed, Returned, failure, shorten
from async_rl.sandbox.protocol import Mode

LARGE_BYTES = 1 << 16
"""The most that is decoded in the server's process for one test."""
# A cell for Python has refused a process. A cell for commands allows it.
_REFUSED = "PermissionError: [Errno 1] Operation not permitted"


class Judge:
    """Verifies programs.

    num_others: cells of each other kind, with `sandbox.packages` (`packaged`) and of each other
    language, which start when a program needs them; num_containers: at a time. Raises ConfigError
    if a package is not installed.
    """

    def __init__(
        self,
        cells: Cells,
        config: SandboxConfig,
        *,
        num_others: int = 1,
        num_containers: int = 1,
    ) -> None:
        self._cells = cells
        self._config = config
        self._containers = Containers(config.container_engine, config.rootfs, num_containers)
        headers = load_headers(config.checker_headers)
        self.commands = CommandJudge(num_others, cells.level, cells.reasons, headers)
        try:
            self.packaged = Cells.of_programs(num_others, cells.level, config.packages)
        except CellFailed as error:
            raise ConfigError(str(error)) from error
        self._package = re.compile(rf"\b(?:{'|'.join(map(re.escape, config.packages))})\b")
        # A process, because the text is the policy's, and parsing it may take any time.
        self._words = TextProcess()

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verdicts of one program. Raises InfrastructureError; cancelling stops the program."""
        program = self._program(request)
        rule = partial(self._ruling, program=program)
        results: list[TestResult] = []
        planned = [(*_plan(test, request.setup), test) for test in request.tests]
        for (mode, _), neighbors in groupby(planned, key=itemgetter(0, 1)):
            if mode is None:
                for *_, test in neighbors:
                    if not program.is_decided(results):
                        results.append(await self._alone(test, program, rule))
            elif not program.is_decided(results):
                questions = [each[2] for each in neighbors]
                ask = await self._asker(mode, program)
                most = 1 if request.is_command else MOST_TESTS
                found = await program.results(questions, ask, rule, most)
                if mode is Mode.STREAMS and any(each.message == _REFUSED for each in found):
                    with suppress(Unsupported):
                        ask = await self.commands.asker(program)
                        found = await program.results(questions, ask, rule, 1)
                results += found
        results = program.with_rest(results)
        failures = (result.verdict for result in results if result.verdict is not Verdict.PASS)
        verdict = next(failures, Verdict.PASS)
        return VerifyResponse(verdict=verdict, tests=results, level=self._cells.level)

    async def run(self, request: VerifyRequest) -> tuple[TestResult, bytes]:
        """Run a program on the standard input of its only test, and do not compare. Returns a pass
        if it exited without an error, and its output.

        Raises InfrastructureError; cancelling stops the program.
        """
        ask = await self._asker(Mode.STREAMS, self._program(request))
        ran = await ran_of(ask([request.tests]))
        (answer,) = ran.answers
        return result_of(answer.ruling, ran.reply), answer.output

    async def _asker(self, mode: Mode, program: Program) -> Ask:
        if program.request.is_command:
            return await self.commands.asker(program)
        return partial(program.run, mode)

    def _program(self, request: VerifyRequest) -> Program:
        cells = self._cells
        if self._config.packages:
            asserts = [test for test in request.tests if isinstance(test, AssertTest)]
            codes = [test.code for test in asserts]
            if any(asked_by(request.setup, test.code, test.own).needs_pytest for test in asserts):
                codes.append("pytest")
            # The text decides, without running it: a false match only costs the start of the other
            # cell.
            if any(map(self._package.search, (request.code, request.setup, *codes))):
                cells = self.packaged
        return Program(request=request, cells=cells, limits=Limits.of(request, self._config))

    async def require(self, request: VerifyRequest) -> None:
        """Raise Unsupported if such programs cannot be judged on this machine."""
        if request.is_command:
            await self.commands.require(request.language)
        for test in request.tests:
            if isinstance(test, ContainerTest):
                await self._containers.require(test.image)

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return sum(each.num_replaced for each in (self._cells, self.packaged, self.commands))

    async def close(self) -> None:
        """End all that the judge has started. The plain cells belong to the caller."""
        await self._words.close()
        await self.packaged.close()
        await self.commands.close()
        await self._containers.close()

    async def _alone(self, test: CodeTest, program: Program, rule: Rule) -> TestResult:
        """The result of a test that shares no child with others."""
        match test:
            case AnswerTest():
                limit_s = program.limits.cpu_s
                verdict = await self._words.verdict(test, program.request.code, limit_s)
                is_right = verdict is Verdict.PASS
                message = "" if is_right else f"not {shorten(test.expected)} by rule {test.rule}"
                return result_of(Ruling(verdict, message))
            case ContainerTest():
                code = program.request.code
                limits = program.limits
                return await judge_contained(self._containers, test, code, limits, rule)
            case StdinTest(checker=Checker() as checker):
                # The program and its checker run side by side.
                ask = await self._asker(Mode.STREAMS, program)
                playing = ask([[test]])
                if isinstance(playing, Ran):
                    return result_of(playing.answers[0].ruling)
                checking = await self._checking(test, b"", checker, program)
                if isinstance(checking, Ruling):
                    return result_of(checking)
                return result_of(*await tried(partial(interacted, playing, checking)))
        assert isinstance(test, AssertTest)
        # Before a cell is used: such a test would fail or pass every program.
        fault = asked_by(program.request.setup, test.code, test.own).fault
        return result_of(Ruling(Verdict.TEST_ERROR, f"the test itself is broken: {fault}"))

    async def _ruling(self, question: Question, body: bytes, program: Program) -> Ruling:
        """The ruling on a returned value or a printed text. Raises InfrastructureError."""
        if isinstance(question, AssertTest):
            return Ruling()  # a judging child has decided
        emitted: Returned | Printed
        if isinstance(question, StdinTest):
            # The row knows its problem better than the configuration.
            if question.checker is not None:
                run = await self._checking(question, body, question.checker, program)
                return run if isinstance(run, Ruling) else await tried(run.once)
            # Most right programs print exactly this, and it may be large.
            if body == question.output.encode(errors="replace"):
                return Ruling()
            rules = msgspec.structs.astuple(question.rules)
            emitted = Printed(body, question.output, rules)
            size = len(body) + len(question.output)
        else:
            emitted = Returned(body, *question)
            size = len(body)
        tolerance = self._config.float_tolerance
        # A child costs 2 ms, and most values are small.
        if size <= LARGE_BYTES:
            message = failure(emitted, tolerance)
            return Ruling(Verdict.WRONG_ANSWER, message) if message else Ruling()
        limits = program.limits.with_room(size)
        ran = await tried(program.job(Mode.COMPARE, tolerance, tuple(emitted), limits=limits).once)
        return ran.answers[0].ruling

    async def _checking(
        self, test: StdinTest, output: bytes, checker: Checker, program: Program
    ) -> Run[Ruling] | Ruling:
        """The run of a checker, which cannot run if it does not compile."""
        given, answer = (text.encode(errors="replace") for text in (test.input, test.output))
        files = [given, output, answer]
        limits = program.limits.with_room(sum(map(len, files)))
        if checker.language != PYTHON:
            compiler = await self.commands.require(checker.language)
            return await compiler.check(checker, files, limits)
        how = checker.code, checker.form, checker.interacts
        files = [output, b"", given, answer]
        run = program.job(Mode.CHECK, *how, limits=limits, files=files)
        return Run(run.cells, run.work, lambda outcome: _decision(run.read(outcome)))


async def problem_with_tests(judge: Judge, problem: CodeProblem) -> str:
    """The reason why the tests of a row are useless; empty if they are not, or judge words.

    A program that does nothing runs on them: a test that it passes teaches a policy nothing, and a
    test that breaks for it would break for every program. Raises InfrastructureError.
    """
    if not problem.tests or any(isinstance(test, AnswerTest) for test in problem.tests):
        return ""
    usable = sorted(
        name for name in names_asked(problem) if name.isidentifier() and not keyword.iskeyword(name)
    )
    request = VerifyRequest(
        # Prints nothing and defines every function that the tests call; they return None.
        code="".join(f"def {name}(*args, **keywords): pass\n" for name in usable),
        tests=problem.tests,
        setup=problem.setup,
        stop_at_first_failure=False,
    )
    response = await judge.verify(request)
    broken = [test for test in response.tests if test.verdict is Verdict.TEST_ERROR]
    if broken:
        return broken[0].message
    if response.verdict is Verdict.PASS:
        return "a program that prints nothing and returns None passes every test"
    return ""


def _decision(ran: Ran) -> Ruling:
    """The ruling of the child of a checker."""
    verdict, message = ran.answers[0].ruling
    if verdict is Verdict.COMPILE_ERROR:
        return Ruling(Verdict.TEST_ERROR, f"the checker does not compile: {message}")
    return Ruling() if verdict is Verdict.PASS else rejected(message)


def _plan(test: CodeTest, setup: str) -> tuple[Mode | None, bool, Sequence[Question]]:
    """How a test runs, whether as an assert statement, and its questions; None for a test that
    shares no child.
    """
    match test:
        case CallTest():
            return Mode.CALLS, False, [Call(test.function, test.args, test.expected, test.types)]
        case StdinTest() if not test.interacts:
            return Mode.STREAMS, False, [test]
        case AssertTest():
            asked = asked_by(setup, test.code, test.own)
            if asked.calls:
                return Mode.CALLS, True, asked.calls
            if not asked.fault:
                return Mode.JUDGE, True, [test]
    return None, False, []
