"""From a program and its tests to verdicts: plans the children to run, reads what they emitted,
compares it here, outside the jail.

Takes a VerifyRequest; waits for cells; gives a VerifyResponse, or raises InfrastructureError when
no cell could run the program. Tests run in order; neighbours of one kind share a child.  A test
during which the child ended has its verdict from that; the tests after it go on in a fresh child.
A stream test that failed in a shared child is tried again in a fresh one, unspoilt by earlier runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from async_rl.config.rewards import SandboxConfig
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, AssertTest, CallTest, CodeTest, StdinTest, Verdict
from async_rl.rewards.verifier.answer_child import AnswerChild
from async_rl.rewards.verifier.asserts import Assertion, take_apart
from async_rl.rewards.verifier.comparison import Comparison, load_checker, shorten
from async_rl.rewards.verifier.flavours import PackagedPool
from async_rl.rewards.verifier.outcomes import (
    NO_VALUE,
    Answer,
    Answers,
    ChildFault,
    read_calls,
    read_judged,
    read_streams,
)
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.sandbox.cell import CellFailed, Job, Outcome, job_request
from async_rl.sandbox.pool import Pool
from async_rl.sandbox.protocol import Mode, Request

_TRIES = 2
_MAX_STREAMS = 64
_MIB = 1 << 20
_LARGE_BYTES = 1 << 20
T = TypeVar("T")


class Printed(NamedTuple):
    """What a program did with one standard input. verdict: pass if it ended well, nothing was
    compared; output: up to the output limit.
    """

    verdict: Verdict
    output: str
    message: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class _Limits:
    cpu_s: float
    memory_bytes: int
    output_bytes: int
    stop: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """One child's part of the tests: a stretch of calls, of streams, or one judged test."""

    code: str
    setup: str
    limits: _Limits
    pool: Pool


class Judge:
    """Verifies programs with the cells of one pool."""

    def __init__(
        self, pool: Pool, config: SandboxConfig, packaged: PackagedPool | None = None
    ) -> None:
        self._pool, self._config, self._packaged = pool, config, packaged
        self._answers = AnswerChild()
        self._comparison = Comparison(
            relative_tolerance=config.float_tolerance, checker=load_checker(config.checker)
        )

    async def verify(self, request: VerifyRequest) -> VerifyResponse:
        """Verdicts of one program. Raises InfrastructureError; cancelling ends the program."""
        limits = self._limits(request)
        run = _Run(request.code, request.setup, limits, await self._pool_for(request))
        results: list[TestResult] = []
        for kind, tests in groupby(request.tests, key=_kind):
            results += await self._family(kind, list(tests), run)
            failed = next(
                (i for i, result in enumerate(results) if result.verdict is not Verdict.PASS), None
            )
            if limits.stop and failed is not None:
                results = results[: failed + 1]
                break
        verdict = next(
            (result.verdict for result in results if result.verdict is not Verdict.PASS),
            Verdict.PASS,
        )
        return VerifyResponse(verdict=verdict, tests=results, level=self._pool.level)

    def _limits(self, request: VerifyRequest) -> _Limits:
        config, stop = self._config, request.stop_at_first_failure
        return _Limits(
            cpu_s=request.timeout_s or config.timeout_s,
            memory_bytes=(request.memory_mb or config.memory_mb) * _MIB,
            output_bytes=(request.output_kb or config.output_kb) * 1024,
            stop=config.stop_at_first_failure if stop is None else stop,
        )

    async def _pool_for(self, request: VerifyRequest) -> Pool:
        if self._packaged is None:
            return self._pool
        return await self._packaged.pool_for(
            (
                request.code,
                request.setup,
                *(test.code for test in request.tests if isinstance(test, AssertTest)),
            )
        )

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return self._pool.num_replaced + (self._packaged.num_replaced if self._packaged else 0)

    async def run(self, request: VerifyRequest, stdin: str) -> Printed:
        """What a program prints for one standard input. Raises InfrastructureError; cancelling ends
        the program.
        """
        run = _Run(request.code, "", self._limits(request), await self._pool_for(request))
        job = self._job(Mode.STREAMS, 1, run, run.code, [stdin.encode(errors="replace")])
        outcome, answers, wall_s = await self._run(job, read_streams, run.pool)
        answer = answers.answers[0]
        return Printed(
            answer.verdict,
            outcome.outputs[0][: run.limits.output_bytes].decode(errors="replace"),
            answer.message,
            wall_s,
        )

    async def _family(self, kind: str, tests: list[Any], run: _Run) -> list[TestResult]:
        if kind == "answer":
            return [await self._answer(test, run) for test in tests]
        if kind == "call":
            return await self._calls(
                [_call_check(test, self._comparison) for test in tests], run, has_call_names=True
            )
        if kind == "stdin":
            return await self._streams(tests, run)
        if kind == "assert":
            return await self._calls(
                [check for test in tests for check in _assert_checks(test)],
                run,
                has_call_names=False,
            )
        return await self._judged_tests(tests, run)

    async def _answer(self, test: AnswerTest, run: _Run) -> TestResult:
        started = time.monotonic()
        verdict = await self._answers.verdict(test, run.code, run.limits.cpu_s)
        message = (
            "" if verdict is Verdict.PASS else f"not {shorten(test.expected)} by rule {test.rule}"
        )
        return TestResult(
            verdict=verdict,
            cpu_s=0,
            wall_s=time.monotonic() - started,
            memory_mb=0,
            message=message,
        )

    async def close(self) -> None:
        """End the process that compares answers."""
        await self._answers.close()

    async def _judged_tests(self, tests: Sequence[AssertTest], run: _Run) -> list[TestResult]:
        """Each test in a judging child of its own, with a solver of its own."""
        results: list[TestResult] = []
        for test in tests:
            job = self._job(Mode.JUDGE, 1, run, run.code)._replace(test=(run.setup, test.code))
            outcome, answers, wall_s = await self._run(job, read_judged, run.pool)
            answer = answers.answers[0]
            results.append(_result(answer.verdict, answer.message, answer.cpu_s, outcome, wall_s))
            if run.limits.stop and answer.verdict is not Verdict.PASS:
                break
        return results

    async def _calls(
        self, checks: Sequence[_Check], run: _Run, *, has_call_names: bool
    ) -> list[TestResult]:
        """Checks in order; the calls of as many as possible in one child."""
        results: list[TestResult] = []
        while len(results) < len(checks):
            rest = checks[len(results) :]
            calls = [call for check in rest for call in check.calls]
            job = self._job(
                Mode.CALLS, len(calls), run, (run.code, calls, run.limits.stop, has_call_names)
            )
            outcome, answers, wall_s = await self._run(job, read_calls, run.pool)
            results += await self._compare(
                outcome, _judged_calls, rest, answers.answers, outcome, wall_s, run.limits.stop
            )
            if answers.is_final or (run.limits.stop and results[-1].verdict is not Verdict.PASS):
                break
        return results

    async def _streams(self, tests: Sequence[StdinTest], run: _Run) -> list[TestResult]:
        results: list[TestResult] = []
        size = _MAX_STREAMS
        while len(results) < len(tests):
            rest = tests[len(results) : len(results) + size]
            job = self._job(
                Mode.STREAMS,
                len(rest),
                run,
                run.code,
                [test.input.encode(errors="replace") for test in rest],
            )
            outcome, answers, wall_s = await self._run(job, read_streams, run.pool)
            judged, is_spoilt = await self._compare(
                outcome, self._judged_streams, rest, answers.answers, outcome, wall_s, run
            )
            results += judged
            if run.limits.stop and judged and judged[-1].verdict is not Verdict.PASS:
                break
            size = 1 if is_spoilt else _MAX_STREAMS
        return results

    def _judged_streams(
        self,
        tests: Sequence[StdinTest],
        answers: Sequence[Answer],
        outcome: Outcome,
        wall_s: float,
        run: _Run,
    ) -> tuple[list[TestResult], bool]:
        """Results up to the first failure if that is wanted; and whether the next test has to be
        tried again in a child of its own.
        """
        results: list[TestResult] = []
        for index, (test, answer) in enumerate(zip(tests, answers, strict=False)):
            verdict, message = answer.verdict, answer.message
            if answer.value is not NO_VALUE and not self._comparison.passes_output(
                test, answer.value
            ):
                verdict, message = (
                    Verdict.WRONG_ANSWER,
                    f"printed {shorten(answer.value)}, not {shorten(test.output)}",
                )
            if verdict is not Verdict.PASS and index > 0 and len(outcome.frames.frames) > 1:
                return results, True
            results.append(_result(verdict, message, answer.cpu_s, outcome, wall_s / len(tests)))
            if verdict is not Verdict.PASS and run.limits.stop:
                break
        return results, False

    async def _compare(self, outcome: Outcome, compare: Callable[..., T], *args: Any) -> T:
        """Comparing in a thread where it may take long: the loop that hands out cells must not wait
        for it.
        """
        num_bytes = sum(map(len, outcome.outputs)) + sum(
            len(frame.body) for frame in outcome.frames.frames
        )
        if self._comparison.checker is not None or num_bytes > _LARGE_BYTES:
            return await asyncio.to_thread(compare, *args)
        return compare(*args)

    def _job(
        self, mode: Mode, num_runs: int, run: _Run, payload: Any, inputs: Sequence[bytes] = ()
    ) -> Job:
        limits = run.limits
        request = job_request(
            mode,
            num_runs,
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            output_bytes=limits.output_bytes,
        )
        return Job(request, payload, inputs)

    async def _run(
        self, job: Job, read: Callable[[Outcome, Request], Answers], pool: Pool
    ) -> tuple[Outcome, Answers, float]:
        problem: Exception | None = None
        for _ in range(_TRIES):
            started = time.monotonic()
            try:
                outcome = await pool.run(job)
                return outcome, read(outcome, job.request), time.monotonic() - started
            except (CellFailed, ChildFault) as error:
                problem = error
        raise InfrastructureError(
            f"no cell could run the program, tried {_TRIES} times: {problem}"
        ) from problem


@dataclass(frozen=True, slots=True)
class _Check:
    """Calls to make, and what decides about the values they return."""

    calls: tuple[tuple[str, Any, Any], ...]
    judge: Callable[[list[Any]], str]


def _kind(test: CodeTest) -> str:
    if isinstance(test, AnswerTest):
        return "answer"
    if isinstance(test, CallTest):
        return "call"
    if isinstance(test, StdinTest):
        return "stdin"
    return "assert" if take_apart(test.code) is not None else "judge"


def _call_check(test: CallTest, comparison: Comparison) -> _Check:
    def judge(values: list[Any]) -> str:
        if comparison.passes_value(test, values[0]):
            return ""
        return (
            f"{test.function}({', '.join(map(shorten, test.args))}) gave {shorten(values[0])}, not"
            f" {shorten(test.expected)}"
        )

    return _Check(((test.function, test.args, {}),), judge)


def _assert_checks(test: AssertTest) -> list[_Check]:
    return [
        _Check(
            tuple((call.function, call.args, dict(call.keywords)) for call in assertion.calls),
            _assert_judge(assertion),
        )
        for assertion in take_apart(test.code) or ()
    ]


def _assert_judge(assertion: Assertion) -> Callable[[list[Any]], str]:
    def judge(values: list[Any]) -> str:
        try:
            return (
                ""
                if assertion.holds(values)
                else f"{assertion.source} failed for {', '.join(map(shorten, values))}"
            )
        except (
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            return f"{assertion.source} raised {type(error).__name__}: {str(error)[:100]}"

    return judge


def _judged_calls(
    checks: Sequence[_Check], answers: Sequence[Answer], outcome: Outcome, wall_s: float, stop: bool
) -> list[TestResult]:
    """Results of the checks that were reached; the last of them may have ended during one of its
    calls.
    """
    results: list[TestResult] = []
    taken = 0
    for check in checks:
        mine = answers[taken : taken + len(check.calls)]
        taken += len(mine)
        if not mine:
            break
        results.append(_judged(check, mine, outcome, wall_s / len(checks)))
        if len(mine) < len(check.calls) or (stop and results[-1].verdict is not Verdict.PASS):
            break
    return results


def _judged(
    check: _Check, answers: Sequence[Answer], outcome: Outcome, wall_s: float
) -> TestResult:
    failed = next((answer for answer in answers if answer.value is NO_VALUE), None)
    if failed is not None:
        verdict, message = failed.verdict, failed.message
    else:
        message = check.judge([answer.value for answer in answers])
        verdict = Verdict.WRONG_ANSWER if message else Verdict.PASS
    return _result(verdict, message, sum(answer.cpu_s for answer in answers), outcome, wall_s)


def _result(
    verdict: Verdict, message: str, cpu_s: float, outcome: Outcome, wall_s: float
) -> TestResult:
    reply = outcome.reply
    return TestResult(
        verdict=verdict,
        cpu_s=min(cpu_s, reply.cpu_s),
        wall_s=wall_s,
        memory_mb=reply.peak_bytes / _MIB,
        message=message,
    )
