"""From the answers of one child to the results of the tests that it ran. Pure.

A check is a few calls of the program and a decision about the values that they return: a call test
is one check, an assert test is one per assert statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.rewards.verifier.asserts import FunctionCall
from async_rl.rewards.verifier.comparison import Comparison, shorten
from async_rl.rewards.verifier.outcomes import NO_VALUE, Answer
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.cell import Outcome

_MIB = 1 << 20


class Check(Protocol):
    """Calls to make, and a decision about the values that they return."""

    @property
    def calls(self) -> Sequence[FunctionCall]:
        """The calls, in order."""

    def failure(self, values: Sequence[object]) -> str:
        """The reason why the returned values are wrong; empty if they are right."""


@dataclass(frozen=True, slots=True)
class CallCheck:
    """The check of a call test."""

    test: CallTest
    comparison: Comparison

    @property
    def calls(self) -> Sequence[FunctionCall]:
        """The one call."""
        return (FunctionCall(self.test.function, self.test.args, {}),)

    def failure(self, values: Sequence[object]) -> str:
        """The reason why the returned value is wrong; empty if it is right."""
        test, value = self.test, values[0]
        if self.comparison.passes_value(test, value):
            return ""
        call = f"{test.function}({', '.join(map(shorten, test.args))})"
        return f"{call} returned {shorten(value)}, not {shorten(test.expected)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """The outcome and the answers of one child, and the seconds of the whole job.

    is_slow: as in Answers. stop: results end at the first failure.
    """

    outcome: Outcome
    answers: Sequence[Answer]
    is_slow: bool
    wall_s: float
    stop: bool

    def check_results(self, checks: Sequence[Check]) -> list[TestResult]:
        """Results of the checks that were reached. The child may have ended during the last one."""
        results: list[TestResult] = []
        first = 0
        for check in checks:
            answers = self.answers[first : first + len(check.calls)]
            first += len(answers)
            is_partial = len(answers) < len(check.calls)
            if not answers or (is_partial and self.is_slow):
                break
            results.append(self._check_result(check, answers, self.wall_s / len(checks)))
            if is_partial or self.ends(results):
                break
        return results

    def _check_result(self, check: Check, answers: Sequence[Answer], wall_s: float) -> TestResult:
        failed = next((answer for answer in answers if answer.value is NO_VALUE), None)
        if failed is not None:
            verdict, message = failed.verdict, failed.message
        else:
            message = check.failure([answer.value for answer in answers])
            verdict = Verdict.WRONG_ANSWER if message else Verdict.PASS
        return self._result(verdict, message, sum(answer.cpu_s for answer in answers), wall_s)

    def stream_results(
        self, tests: Sequence[StdinTest], comparison: Comparison
    ) -> tuple[list[TestResult], bool]:
        """Results of the streams, and whether the next test needs a child of its own.

        A stream that fails by itself after others in the same child may fail because of what they
        left. An answer is final: a program that answers otherwise in a fresh child would have two
        guesses.
        """
        results: list[TestResult] = []
        is_shared = len(self.outcome.frames.frames) > 1
        for index, (test, answer) in enumerate(zip(tests, self.answers, strict=False)):
            verdict, message = answer.verdict, answer.message
            if verdict is not Verdict.PASS and index > 0 and is_shared:
                return results, True
            if verdict is Verdict.PASS and not comparison.passes_output(test, answer.value):
                verdict = Verdict.WRONG_ANSWER
                message = f"printed {shorten(answer.value)}, not {shorten(test.output)}"
            results.append(self._result(verdict, message, answer.cpu_s, self.wall_s / len(tests)))
            if self.ends(results):
                break
        return results, self.is_slow

    def judged_result(self) -> TestResult:
        """The result of a test that ran in a judge process."""
        answer = self.answers[0]
        return self._result(answer.verdict, answer.message, answer.cpu_s, self.wall_s)

    def ends(self, results: Sequence[TestResult]) -> bool:
        """True if the last result is a failure after which no test is to run."""
        return self.stop and bool(results) and results[-1].verdict is not Verdict.PASS

    def _result(self, verdict: Verdict, message: str, cpu_s: float, wall_s: float) -> TestResult:
        reply = self.outcome.reply
        return TestResult(
            verdict=verdict,
            cpu_s=min(cpu_s, reply.cpu_s),
            wall_s=wall_s,
            memory_mb=reply.peak_bytes / _MIB,
            message=message,
        )
