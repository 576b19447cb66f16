"""A program of a request with its limits, and the results of the tests that one child ran.

A call test is one call of the program; an assert test may be several.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from async_rl.config.rewards import MOST_TIMEOUTS, OUTPUT_KB, SandboxConfig
from async_rl.core.assert_tests import Call, asked_by
from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.core.types import AssertTest, StdinTest, Verdict
from async_rl.rewards.verifier.outcomes import MIB, ChildFault, Ran, Ruling, read_job, result_of
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cell import CellFailed, Outcome, Work, job, packed
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import JobSpec, Mode

T = TypeVar("T")
# Tests that share a child: a message to a cell has at most 200 descriptors, two per stream.
MOST_TESTS = 64
# What a stream does in a shared child and would do alone.
_LASTING = (Verdict.PASS, Verdict.COMPILE_ERROR)
# A cell that fails says nothing about the program; a program that breaks two cells is suspect.
_TRIES = 2


async def tried(cells: Cells, work: Work, read: Callable[[Outcome], T], failure: str) -> T:
    """Run work and read its outcome. Raises InfrastructureError, which starts with `failure`, if no
    cell could run it.
    """
    problem: Exception | None = None
    for _ in range(_TRIES):
        try:
            return read(await cells.run(work))
        # Only these two: any other error is a fault of the verifier, and must be seen.
        except (CellFailed, ChildFault) as error:
            problem = error
    raise InfrastructureError(f"{failure}, tried {_TRIES} times: {problem}") from problem


NO_CELL = "no cell could run the program"


class Limits(NamedTuple):
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
        return self._replace(memory_bytes=self.memory_bytes + num_bytes)

    def with_output_of(self, tests: Sequence[StdinTest]) -> Limits:
        """Return limits in which a right answer fits, even if the request sets a lower limit."""
        # Otherwise a small limit would fail every program, right ones too.
        longest = max(len(test.output.encode(errors="replace")) for test in tests)
        return self._replace(output_bytes=max(self.output_bytes, 2 * longest))


Question = Call | StdinTest | AssertTest
"""What one run of a child answers. An assert test may be one, or several calls."""
Rule = Callable[[Any, bytes], Awaitable[Ruling]]
"""Decides about what a program emitted for a question."""
Ask = Callable[[Sequence[Sequence[Any]]], Awaitable[Ran]]
"""Runs one child that answers the questions of several tests."""


@frozen
class Program:
    """One program of a request. cells: that run it, if it is in Python."""

    request: VerifyRequest
    cells: Cells
    limits: Limits

    @property
    def stop(self) -> bool:
        """Return whether its results end at the first failure, which decides."""
        return self.request.stop_at_first_failure is not False

    def is_decided(self, results: Sequence[TestResult]) -> bool:
        """Return whether no further test is to run."""
        # A policy gains nothing from later tests once one has failed.
        if self.stop:
            return bool(results) and results[-1].verdict is not Verdict.PASS
        # Each timeout takes the whole limit: a program that loops would hold a cell for minutes.
        num_late = sum(result.verdict is Verdict.TIMEOUT for result in results)
        return num_late >= MOST_TIMEOUTS

    def with_rest(self, results: list[TestResult], num_tests: int) -> list[TestResult]:
        """Add the results of the tests that did not run because other tests used up their time."""
        message = f"not run: {MOST_TIMEOUTS} tests of the program used up their time"
        late = result_of(Ruling(Verdict.TIMEOUT, message))
        return results if self.stop else results + [late] * (num_tests - len(results))

    async def run(
        self,
        mode: Mode,
        *payload: Any,
        limits: Limits | None = None,
        num_runs: int = 1,
        num_tests: int = 1,
        files: Sequence[bytes] = (),
    ) -> Ran:
        """Run a job and read its output. limits: limits instead of the program's; files: the other
        files of the Job. Raises InfrastructureError if no cell could run it.
        """
        spec = JobSpec(mode, num_runs, *(limits or self.limits), num_tests=num_tests)
        work = job(spec, payload, files)
        return await tried(self.cells, work, lambda outcome: read_job(outcome, spec), NO_CELL)

    async def results(
        self, tests: Sequence[Sequence[Question]], ask: Ask, rule: Rule, most: int
    ) -> list[TestResult]:
        """Run tests in order. tests: the questions of each; most: tests in one child.

        A child may exit early: the rest continues in a fresh one. A stream that fails after other
        streams in the same child may fail because of state that they left behind, so it is
        repeated. An answer is final: a program that answers differently in a fresh child would have
        two guesses.
        """
        results: list[TestResult] = []
        size = most
        while len(results) < len(tests) and not self.is_decided(results):
            shared = tests[len(results) : len(results) + size]
            ran = await ask(shared)
            rest = ran.answers
            most = 1 if ran.is_slow else most
            size = most
            for test in shared:
                answers = rest[: len(test)]
                rest = rest[len(test) :]
                is_partial = len(answers) < len(test)
                # The time that was left for this test depends on the tests before it.
                if not answers or (is_partial and ran.is_slow):
                    break
                is_stream = isinstance(test[0], StdinTest)
                is_first = test is shared[0]
                # A program that does not compile has no leftovers: it fails for every stream.
                if is_stream and not is_first and answers[0].ruling.verdict not in _LASTING:
                    size = 1
                    break
                for question, answer in zip(test, answers, strict=False):
                    ruling = answer.ruling
                    if ruling.verdict is Verdict.PASS:
                        ruling = await rule(question, answer.output)
                    if ruling.verdict is not Verdict.PASS:
                        break
                cpu_s = sum(answer.cpu_s for answer in answers)
                results.append(result_of(ruling, ran.reply, cpu_s, len(shared)))
                if is_partial or self.is_decided(results):
                    break
        return results

    def ask(self, mode: Mode, tests: Sequence[Sequence[Any]]) -> Awaitable[Ran]:
        """Run one child that answers the questions of tests."""
        questions = [question for test in tests for question in test]
        payload: list[Any] = [self.request.code]
        limits = self.limits
        files = []
        if mode is Mode.CALLS:
            # Only call tests are in the style of LeetCode.
            has_call_names = questions[0].types != "python"
            payload += [[tuple(call[:2]) for call in questions], self.stop, has_call_names]
        elif mode is Mode.STREAMS:
            limits = limits.with_output_of(questions)
            for test in questions:
                files += [test.input.encode(errors="replace"), b""]
        else:
            setup = self.request.setup
            asked = [(asked_by(setup, test.code, test.own), test) for test in questions]
            codes = [
                (each.imports, test.code, sorted(each.own), each.needs_pytest)
                for each, test in asked
            ]
            files = [packed((setup, codes, self.stop))]
        return self.run(
            mode,
            *payload,
            limits=limits,
            num_runs=len(questions),
            num_tests=len(tests),
            files=files,
        )
