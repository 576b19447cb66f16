"""A program of a request with its limits, and the results of the tests that one child ran.

A check is a few calls of the program and a decision about the values that they return: a call test
is one check, an assert test has one check per assert statement.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from async_rl.config.rewards import MOST_TIMEOUTS, OUTPUT_KB, SandboxConfig
from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.asserts import FunctionCall
from async_rl.rewards.verifier.outcomes import MIB, Answer, Answers, ChildFault, Ruling
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.sandbox.cell import CellFailed, Job, Outcome, Work
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import JobSpec, Mode

Read = TypeVar("Read")
T = TypeVar("T")
_TRIES = 2
"""A cell that fails says nothing about the program; a program that breaks two cells is suspect."""


async def tried(cells: Cells, work: Work[Read], read: Callable[[Read], T], failure: str) -> T:
    """Run work and read its outcome. Raises InfrastructureError, which starts with `failure`, if no
    cell could run it.
    """
    problem: Exception | None = None
    for _ in range(_TRIES):
        try:
            return read(await cells.run(work))
        except (CellFailed, ChildFault) as error:
            problem = error
    raise InfrastructureError(f"{failure}, tried {_TRIES} times: {problem}") from problem


NO_CELL = "no cell could run the program"


@frozen
class Limits:
    """The limits of one test; cpu_s does not include the start of the runtime."""

    cpu_s: float
    memory_bytes: int
    output_bytes: int

    @classmethod
    def of(cls, request: VerifyRequest, config: SandboxConfig) -> Limits:
        """Return the limits of the request, or the limits of the configuration."""
        return cls(
            cpu_s=request.timeout_s or config.timeout_s,
            memory_bytes=(request.memory_mb or config.memory_mb) * MIB,
            output_bytes=(request.output_kb or OUTPUT_KB) * 1024,
        )

    def with_memory(self, num_bytes: int) -> Limits:
        """Return the limits with more memory."""
        memory_bytes = self.memory_bytes + num_bytes
        return Limits(cpu_s=self.cpu_s, memory_bytes=memory_bytes, output_bytes=self.output_bytes)

    def with_output_of(self, tests: Sequence[StdinTest]) -> Limits:
        """Return limits in which a right answer fits, even if the request sets a lower limit."""
        longest = max(len(test.output.encode(errors="replace")) for test in tests)
        output_bytes = max(self.output_bytes, 2 * longest)
        return Limits(cpu_s=self.cpu_s, memory_bytes=self.memory_bytes, output_bytes=output_bytes)


class Check(NamedTuple):
    """Calls to make in order, and the ruling on the values that they return."""

    calls: Sequence[FunctionCall]
    rule: Callable[[list[bytes]], Awaitable[Ruling]]


Rule = Callable[[StdinTest, bytes], Awaitable[Ruling]]
"""Decides about the output of a test."""


def result_of(
    ruling: Ruling, *, cpu_s: float = 0.0, wall_s: float = 0.0, memory_mb: float = 0.0
) -> TestResult:
    """A ruling as the result of a test."""
    return TestResult(
        verdict=ruling.verdict,
        cpu_s=cpu_s,
        wall_s=wall_s,
        memory_mb=memory_mb,
        message=ruling.message,
    )


def response_of(results: list[TestResult], level: int) -> VerifyResponse:
    """The response: its verdict is the verdict of the first failure."""
    failures = (result.verdict for result in results if result.verdict is not Verdict.PASS)
    return VerifyResponse(verdict=next(failures, Verdict.PASS), tests=results, level=level)


def stops(request: VerifyRequest) -> bool:
    """Return whether the first failure decides, which is the default."""
    return request.stop_at_first_failure is not False


def is_decided(results: Sequence[TestResult], *, stop: bool) -> bool:
    """Return whether no further test is to run. stop: the first failure decides."""
    if stop:
        return bool(results) and results[-1].verdict is not Verdict.PASS
    num_late = sum(result.verdict is Verdict.TIMEOUT for result in results)
    return num_late >= MOST_TIMEOUTS


def with_rest(results: list[TestResult], num_tests: int, *, stop: bool) -> list[TestResult]:
    """Add the results of the tests that did not run because other tests used up their time."""
    message = f"not run: {MOST_TIMEOUTS} tests of the program used up their time"
    late = result_of(Ruling(Verdict.TIMEOUT, message))
    return results if stop else results + [late] * (num_tests - len(results))


@frozen
class ChildRun:
    """The outcome and the answers of one child, and the seconds of the whole job.

    is_slow: as in Answers. stop: results end at the first failure.
    """

    outcome: Outcome
    answers: Sequence[Answer]
    is_slow: bool
    wall_s: float
    stop: bool

    async def check_results(self, checks: Sequence[Check]) -> list[TestResult]:
        """Results of the checks that were reached. The child may have exited during the last
        check.
        """
        results: list[TestResult] = []
        first = 0
        for check in checks:
            answers = self.answers[first : first + len(check.calls)]
            first += len(answers)
            is_partial = len(answers) < len(check.calls)
            if not answers or (is_partial and self.is_slow):
                break
            values = [answer.value for answer in answers if answer.value is not None]
            if len(values) == len(answers):
                ruling = await check.rule(values)
            else:
                failed = next(answer for answer in answers if answer.value is None)
                ruling = Ruling(failed.verdict, failed.message)
            cpu_s = sum(answer.cpu_s for answer in answers)
            results.append(self._result(ruling, cpu_s, self.wall_s / len(checks)))
            if is_partial or is_decided(results, stop=self.stop):
                break
        return results

    async def stream_results(
        self,
        tests: Sequence[StdinTest],
        rule: Callable[[StdinTest, bytes], Awaitable[Ruling]],
    ) -> tuple[list[TestResult], bool]:
        """Return the results of the streams, and whether the next test needs a separate child.

        A stream that fails after others in the same child may fail because of state that they left
        behind, so it is repeated. An answer is final: a program that answers differently in a fresh
        child would have two guesses.
        """
        results: list[TestResult] = []
        is_shared = len(self.outcome.frames.frames) > 1
        for index, (test, answer) in enumerate(zip(tests, self.answers, strict=False)):
            if answer.value is not None:
                ruling = await rule(test, answer.value)
            elif index > 0 and is_shared:
                return results, True
            else:
                ruling = Ruling(answer.verdict, answer.message)
            results.append(self._result(ruling, answer.cpu_s, self.wall_s / len(tests)))
            if is_decided(results, stop=self.stop):
                break
        return results, self.is_slow

    @property
    def ruling(self) -> Ruling:
        """The ruling of the only answer."""
        return Ruling(self.answers[0].verdict, self.answers[0].message)

    def judged_result(self) -> TestResult:
        """The result of a test that ran in a judge process."""
        return self._result(self.ruling, self.answers[0].cpu_s, self.wall_s)

    def _result(self, ruling: Ruling, cpu_s: float, wall_s: float) -> TestResult:
        reply = self.outcome.reply
        return result_of(
            ruling,
            cpu_s=min(cpu_s, reply.cpu_s),
            wall_s=wall_s,
            memory_mb=reply.peak_bytes / MIB,
        )


@frozen
class Program:
    """One program of a request. stop: its results end at the first failure."""

    code: str
    setup: str
    cells: Cells
    limits: Limits
    stop: bool

    async def run(
        self,
        mode: Mode,
        payload: tuple[Any, ...],
        read: Callable[[Outcome, JobSpec], Answers],
        *,
        limits: Limits | None = None,
        num_runs: int = 1,
        num_tests: int = 1,
        **more: Any,
    ) -> ChildRun:
        """Run a job and read its output. limits: limits instead of the program's; more: of
        the Job. Raises InfrastructureError if no cell could run it.
        """
        within = limits or self.limits
        spec = JobSpec(
            mode,
            num_runs,
            cpu_s=within.cpu_s,
            memory_bytes=within.memory_bytes,
            output_bytes=within.output_bytes,
            num_tests=num_tests,
        )
        started = time.monotonic()
        outcome, answers = await tried(
            self.cells,
            Job(spec, payload, **more),
            lambda outcome: (outcome, read(outcome, spec)),
            NO_CELL,
        )
        return ChildRun(
            outcome=outcome,
            answers=answers.answers,
            is_slow=answers.is_slow,
            wall_s=time.monotonic() - started,
            stop=self.stop,
        )
