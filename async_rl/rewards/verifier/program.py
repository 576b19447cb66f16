"""A program of a request with its limits, and the results of the tests that one child ran.

A call test is one call of the program; an assert test may be several.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from async_rl.config.rewards import MOST_TIMEOUTS, OUTPUT_KB, SandboxConfig
from async_rl.core.assert_tests import asked_by
from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.core.types import AssertTest, StdinTest, Verdict
from async_rl.rewards.verifier.asserts import Call
from async_rl.rewards.verifier.outcomes import MIB, Answers, ChildFault, Ruling, read_job, result_of
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cell import CellFailed, Job, Outcome, Work
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import JobSpec, Mode

Read = TypeVar("Read")
T = TypeVar("T")
# Tests that share a child: a message to a cell has at most 200 descriptors, two per stream.
_MOST_TESTS = 64
# A cell that fails says nothing about the program; a program that breaks two cells is suspect.
_TRIES = 2


async def tried(cells: Cells, work: Work[Read], read: Callable[[Read], T], failure: str) -> T:
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
        return replace(self, memory_bytes=self.memory_bytes + num_bytes)

    def with_output_of(self, tests: Sequence[StdinTest]) -> Limits:
        """Return limits in which a right answer fits, even if the request sets a lower limit."""
        # Otherwise a small limit would fail every program, right ones too.
        longest = max(len(test.output.encode(errors="replace")) for test in tests)
        return replace(self, output_bytes=max(self.output_bytes, 2 * longest))


Question = Call | StdinTest | AssertTest
"""What one run of a child answers. An assert test may be one, or several calls."""
Rule = Callable[[Any, bytes], Awaitable[Ruling]]
"""Decides about the bytes that a program emitted for a Call or a StdinTest."""


@frozen
class ChildRun:
    """The outcome and the answers of one child, and the seconds of the whole job."""

    outcome: Outcome
    answers: Answers
    wall_s: float

    @property
    def ruling(self) -> Ruling:
        """The ruling of the only answer."""
        return self.answers.answers[0].ruling

    def result(self, ruling: Ruling, cpu_s: float, num_tests: int = 1) -> TestResult:
        """A ruling as the result of one of the child's tests."""
        reply = self.outcome.reply
        return result_of(
            ruling,
            # The program writes the first, and the kernel counts the second.
            cpu_s=min(cpu_s, reply.cpu_s),
            wall_s=self.wall_s / num_tests,
            peak_bytes=reply.peak_bytes,
        )


@frozen
class Program:
    """One program of a request. stop: its results end at the first failure, which decides."""

    code: str
    setup: str
    cells: Cells
    limits: Limits
    stop: bool

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

        def read(outcome: Outcome) -> ChildRun:
            wall_s = time.monotonic() - started
            return ChildRun(outcome=outcome, answers=read_job(outcome, spec), wall_s=wall_s)

        return await tried(self.cells, Job(spec, payload, **more), read, NO_CELL)

    async def results(
        self, mode: Mode, tests: Sequence[Sequence[Question]], rule: Rule
    ) -> list[TestResult]:
        """Run tests in order, as many as possible in one child. tests: the questions of each.

        A child may exit early: the rest continues in a fresh one. A stream that fails after other
        streams in the same child may fail because of state that they left behind, so it is
        repeated. An answer is final: a program that answers differently in a fresh child would have
        two guesses.
        """
        results: list[TestResult] = []
        size, is_alone = _MOST_TESTS, False
        while len(results) < len(tests) and not self.is_decided(results):
            shared = tests[len(results) : len(results) + size]
            child = await self._asked(mode, shared)
            rest, is_slow = child.answers
            is_alone = is_alone or is_slow
            size = 1 if is_alone else _MOST_TESTS
            # A child that did not even load has no leftovers: it failed for every stream.
            has_loaded = mode is Mode.STREAMS and len(child.outcome.frames.frames) > 1
            for test in shared:
                answers, rest = rest[: len(test)], rest[len(test) :]
                is_partial = len(answers) < len(test)
                # The time that was left for this test depends on the tests before it.
                if not answers or (is_partial and is_slow):
                    break
                if answers[0].value is None and has_loaded and test is not shared[0]:
                    size = 1
                    break
                for question, answer in zip(test, answers, strict=False):
                    ruling = answer.ruling
                    if answer.value is not None:
                        ruling = await rule(question, answer.value)
                    if ruling.verdict is not Verdict.PASS:
                        break
                cpu_s = sum(answer.cpu_s for answer in answers)
                results.append(child.result(ruling, cpu_s, len(shared)))
                if is_partial or self.is_decided(results):
                    break
        return results

    def _asked(self, mode: Mode, tests: Sequence[Sequence[Any]]) -> Awaitable[ChildRun]:
        """Run one child that answers the questions of tests."""
        questions = [question for test in tests for question in test]
        payload: list[Any] = [self.code]
        more: dict[str, Any] = {}
        if mode is Mode.CALLS:
            # Only call tests are in the style of LeetCode.
            has_call_names = questions[0].types != "python"
            payload += [[tuple(call[:3]) for call in questions], self.stop, has_call_names]
        elif mode is Mode.STREAMS:
            more["limits"] = self.limits.with_output_of(questions)
            more["inputs"] = [test.input.encode(errors="replace") for test in questions]
        else:
            asked = [(asked_by(self.setup, test.code, test.own), test) for test in questions]
            codes = [(each.imports, test.code, sorted(each.own)) for each, test in asked]
            more["tests"] = (self.setup, codes, self.stop)
        return self.run(mode, *payload, num_runs=len(questions), num_tests=len(tests), **more)
