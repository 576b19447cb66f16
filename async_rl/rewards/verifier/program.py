"""A program of a request with its limits, and the results of the tests that one child ran.

A call test is one call of the program; an assert test may be several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from async_rl.config.rewards import MOST_TIMEOUTS, OUTPUT_KB, SandboxConfig
from async_rl.core.assert_tests import Call, asked_by
from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.core.types import AssertTest, StdinTest, Verdict
from async_rl.rewards.verifier.outcomes import MIB, Ran, Ruling, read_job, result_of
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cell import CellFailed, Outcome, Work, job, packed, pipe
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import Ending, JobSpec, Mode, Reply

T = TypeVar("T")
# Tests that share a child: a message to a cell has at most 200 descriptors, two per stream.
MOST_TESTS = 64
# A stream in a shared child would have these results alone, too.
_LASTING = (Verdict.PASS, Verdict.COMPILE_ERROR)
# A cell that fails says nothing about the program; a program that breaks two cells is suspect.
_TRIES = 2
# Memory of a decoded value, in multiples of its bytes.
_ROOM = 40


class Run(NamedTuple, Generic[T]):
    """Work, the cells that can do it, and the reader of its outcome."""

    cells: Cells
    work: Work
    read: Callable[[Outcome], T]

    async def once(self) -> T:
        """The result. Raises CellFailed."""
        return self.read(await self.cells.run(self.work))


async def tried(work: Callable[[], Awaitable[T]]) -> T:
    """The result of work. Raises InfrastructureError if no cell could do it."""
    problem: CellFailed | None = None
    for _ in range(_TRIES):
        try:
            return await work()
        # Only this one: any other error is a fault of the verifier, and must be seen.
        except CellFailed as error:
            problem = error
    raise InfrastructureError(
        f"no cell could run the program in {_TRIES} attempts: {problem}"
    ) from problem


async def ran_of(asked: Run[Ran] | Ran) -> Ran:
    """The answers of a run. Raises InfrastructureError."""
    return asked if isinstance(asked, Ran) else await tried(asked.once)


async def interacted(program: Run[Ran], checker: Run[Ruling]) -> tuple[Ruling, Reply]:
    """Run a program and its checker side by side, in two cells; each reads what the other prints.

    A program that fails by itself has failed; otherwise the checker decides, and a program that it
    accepts must also end well. This process holds both ends of the pipes, so that neither side
    notices the exit of the other before its reply is here. Raises CellFailed.
    """
    async with program.cells.places, program.cells.cell() as first, checker.cells.cell() as second:
        with pipe() as (stdin, to_program), pipe() as (from_program, stdout):
            play = first.run(program.work.joined(stdin, stdout, second))
            check = second.run(checker.work.joined(from_program, to_program, first))
            playing, checking = map(asyncio.create_task, (play, check))
            try:
                await asyncio.wait((playing, checking), return_when=asyncio.FIRST_COMPLETED)
                if not playing.done() or _ruling(program, playing.result()) == Ruling():
                    stdin.close()
                    stdout.close()
                    checked = await checking
                    if checked.reply.ending in (Ending.CPU, Ending.WALL):
                        late = "its checker waited for it, or used up its time"
                        return Ruling(Verdict.TIMEOUT, late), checked.reply
                    ruling = checker.read(checked)
                    if ruling.verdict is not Verdict.PASS:
                        return ruling, checked.reply
                    to_program.close()
                played = await playing
                return _ruling(program, played), played.reply
            finally:
                playing.cancel()
                checking.cancel()
                await asyncio.gather(playing, checking, return_exceptions=True)


def _ruling(program: Run[Ran], outcome: Outcome) -> Ruling:
    return program.read(outcome).answers[0].ruling


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

    def with_room(self, num_bytes: int) -> Limits:
        """Return the limits with memory for decoded values of so many bytes."""
        return self._replace(memory_bytes=self.memory_bytes + _ROOM * num_bytes)

    def with_output_of(self, tests: Sequence[StdinTest]) -> Limits:
        """Return limits in which a right answer fits, even if the request sets a lower limit."""
        # Otherwise a small limit would fail every program, right ones too.
        longest = max(len(test.output.encode(errors="replace")) for test in tests)
        return self._replace(output_bytes=max(self.output_bytes, 2 * longest))


Question = Call | StdinTest | AssertTest
"""What one run of a child answers. An assert test may be one, or several calls."""
Rule = Callable[[Any, bytes], Awaitable[Ruling]]
"""Decides about what a program emitted for a question."""
Ask = Callable[[Sequence[Sequence[Any]]], Run[Ran] | Ran]
"""One child that answers the questions of several tests, or the answers of a program that cannot
run.
"""


@frozen
class Program:
    """One program of a request. cells: that run it, if it is in Python."""

    request: VerifyRequest
    cells: Cells
    limits: Limits

    def is_decided(self, results: Sequence[TestResult]) -> bool:
        """Return whether no further test is to run."""
        # A policy gains nothing from later tests once one has failed.
        if self.request.stop_at_first_failure:
            return bool(results) and results[-1].verdict is not Verdict.PASS
        # Each timeout takes the whole limit: a program that loops would hold a cell for minutes.
        num_late = sum(result.verdict is Verdict.TIMEOUT for result in results)
        return num_late >= MOST_TIMEOUTS

    def with_rest(self, results: list[TestResult]) -> list[TestResult]:
        """Add the results of the tests that did not run because other tests used up their time."""
        message = f"not run: {MOST_TIMEOUTS} tests of the program used up their time"
        late = result_of(Ruling(Verdict.TIMEOUT, message))
        if self.request.stop_at_first_failure:
            return results
        return results + [late] * (len(self.request.tests) - len(results))

    def job(
        self,
        mode: Mode,
        *payload: Any,
        limits: Limits,
        num_runs: int = 1,
        num_tests: int = 1,
        files: Sequence[bytes] = (),
    ) -> Run[Ran]:
        """A job. files: the other files of the job."""
        spec = JobSpec(mode, num_runs, *limits, num_tests=num_tests)
        return Run(self.cells, job(spec, payload, files), lambda outcome: read_job(outcome, spec))

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
            ran = await ran_of(ask(shared))
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
                results.append(result_of(ruling, ran.reply, len(shared)))
                if is_partial or self.is_decided(results):
                    break
        return results

    def run(self, mode: Mode, tests: Sequence[Sequence[Any]]) -> Run[Ran]:
        """One child that answers the questions of tests."""
        questions = [question for test in tests for question in test]
        payload: list[Any] = [self.request.code]
        stops = self.request.stop_at_first_failure
        limits = self.limits
        files = []
        if mode is Mode.CALLS:
            # Only call tests are in the style of LeetCode.
            has_call_names = questions[0].types != "python"
            payload += [[tuple(call[:2]) for call in questions], stops, has_call_names]
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
            files = [packed((setup, codes, stops))]
        return self.job(
            mode,
            *payload,
            limits=limits,
            num_runs=len(questions),
            num_tests=len(tests),
            files=files,
        )
