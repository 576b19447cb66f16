"""From the answers of one child to the results of the tests that it ran.

A check is a few calls of the program and a decision about the values that they return: a call test
is one check, an assert test is one per assert statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from async_rl.config.rewards import MOST_TIMEOUTS
from async_rl.core.frozen import frozen
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.asserts import FunctionCall
from async_rl.rewards.verifier.outcomes import Answer
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.cell import Outcome

_MIB = 1 << 20


class Ruling(NamedTuple):
    """pass, or the verdict and its reason."""

    verdict: Verdict
    message: str = ""


class Check(NamedTuple):
    """Calls to make in order, and the ruling on the values that they return."""

    calls: Sequence[FunctionCall]
    rule: Callable[[list[bytes]], Awaitable[Ruling]]


def is_decided(results: Sequence[TestResult], *, stop: bool) -> bool:
    """Return whether no further test is to run. stop: the first failure decides."""
    if stop:
        return bool(results) and results[-1].verdict is not Verdict.PASS
    num_late = sum(result.verdict is Verdict.TIMEOUT for result in results)
    return num_late >= MOST_TIMEOUTS


def with_rest(results: list[TestResult], num_tests: int, *, stop: bool) -> list[TestResult]:
    """Add the results of the tests that did not run because others used up their time."""
    message = f"not run: {MOST_TIMEOUTS} tests of the program used up their time"
    late = TestResult(verdict=Verdict.TIMEOUT, cpu_s=0, wall_s=0, memory_mb=0, message=message)
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
        """Results of the checks that were reached. The child may have ended during the last one."""
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

        A stream that fails after others in the same child may fail because of what they left
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

    def judged_result(self) -> TestResult:
        """The result of a test that ran in a judge process."""
        answer = self.answers[0]
        return self._result(Ruling(answer.verdict, answer.message), answer.cpu_s, self.wall_s)

    def _result(self, ruling: Ruling, cpu_s: float, wall_s: float) -> TestResult:
        reply = self.outcome.reply
        return TestResult(
            verdict=ruling.verdict,
            cpu_s=min(cpu_s, reply.cpu_s),
            wall_s=wall_s,
            memory_mb=reply.peak_bytes / _MIB,
            message=ruling.message,
        )
