"""Decides whether the output of a program is right: here if it is small, otherwise in a cell.

A program controls how long its output takes to decode and compare, so a large value never enters
the server's process: `sandbox/comparison.py` compares it in a child with the program's own limits.
A row's checker always runs in a cell. Only `sandbox.checker` of the configuration, which is trusted
code, gets large values here, in a thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from async_rl.config.rewards import SandboxConfig
from async_rl.core.errors import Unsupported
from async_rl.core.languages import PYTHON
from async_rl.core.output_rules import Checker
from async_rl.core.types import CallTest, StdinTest, Verdict
from async_rl.rewards.verifier.asserts import Assertion
from async_rl.rewards.verifier.checker import ask, load_checker, load_headers
from async_rl.rewards.verifier.checks import Ruling
from async_rl.rewards.verifier.command_judging import CommandJudge
from async_rl.rewards.verifier.command_outcomes import Limits
from async_rl.rewards.verifier.outcomes import read_judged
from async_rl.rewards.verifier.program import Program
from async_rl.sandbox.cell import Job
from async_rl.sandbox.comparison import (
    Comparison,
    PlainRules,
    Printed,
    Returned,
    call_text,
    shorten,
)
from async_rl.sandbox.protocol import Mode
from async_rl.sandbox.values import decode

LARGE_BYTES = 1 << 16
"""The most that is decoded in the server's process for one test."""
_MALFORMED = "the returned value is malformed"
_MIB = 1 << 20
_ROOM = 40
"""Memory of a decoded value, in multiples of its bytes."""


_RIGHT = Ruling(Verdict.PASS)


class TooLarge(Exception):
    """The values of an assertion are too large to be compared here."""


class Rulings:
    """Rulings by the settings of a verifier. commands: runs checkers in C++, if there is one."""

    def __init__(self, config: SandboxConfig, commands: CommandJudge | None = None) -> None:
        self._commands, self._headers = commands, load_headers(config.checker_headers)
        self._comparison = Comparison(relative_tolerance=config.float_tolerance)
        self._checker = load_checker(config.checker)

    async def of_value(self, test: CallTest, body: bytes, program: Program) -> Ruling:
        """The ruling on a returned value. Raises InfrastructureError."""
        if self._checker is None:
            returned = Returned(body, test.expected, test.types, test.function, test.args)
            return await self._compared(returned, len(body), program)
        try:
            value = await asyncio.to_thread(decode, body)
        except (ValueError, MemoryError):
            return Ruling(Verdict.WRONG_ANSWER, _MALFORMED)
        is_right = await asyncio.to_thread(ask, self._checker, test.args, value, test.expected)
        call = call_text(test.function, test.args)
        message = f"{call} returned {shorten(value)}, not {shorten(test.expected)}"
        return _RIGHT if is_right else Ruling(Verdict.WRONG_ANSWER, message)

    async def of_output(self, test: StdinTest, output: bytes, program: Program) -> Ruling:
        """The ruling on what was printed. Raises InfrastructureError."""
        if test.checker is not None:
            return await self._checked(test, output, test.checker, program)
        if self._checker is not None:
            text = output.decode(errors="replace")
            is_right = await asyncio.to_thread(ask, self._checker, test.input, text, test.output)
            message = f"printed {shorten(text)}, not {shorten(test.output)}"
            return _RIGHT if is_right else Ruling(Verdict.WRONG_ANSWER, message)
        expected = test.output.encode(errors="replace")
        if output == expected:
            return _RIGHT
        rules = test.rules
        plain = PlainRules(
            rules.layout, rules.ignores_case, rules.relative_tolerance, rules.absolute_tolerance
        )
        size = len(output) + len(expected)
        return await self._compared(Printed(output, test.output, plain), size, program)

    async def of_assertion(self, assertion: Assertion, bodies: list[bytes]) -> Ruling:
        """The ruling on the values of an assert statement. Raises TooLarge."""
        if sum(map(len, bodies)) > LARGE_BYTES:
            raise TooLarge
        try:
            message = assertion.failure(list(map(decode, bodies)))
        except (ValueError, MemoryError):
            message = _MALFORMED
        return Ruling(Verdict.WRONG_ANSWER, message) if message else _RIGHT

    async def _compared(self, emitted: Returned | Printed, size: int, program: Program) -> Ruling:
        if size <= LARGE_BYTES:
            message = emitted.failure(self._comparison)
            return Ruling(Verdict.WRONG_ANSWER, message) if message else _RIGHT
        roomy = replace(program, memory_bytes=program.memory_bytes + _ROOM * size)
        fields = tuple(tuple(part) if isinstance(part, PlainRules) else part for part in emitted)
        payload = (self._comparison.relative_tolerance, fields)
        return await _ruling_of(roomy.job(Mode.COMPARE, 1, payload), roomy)

    async def _checked(
        self, test: StdinTest, output: bytes, checker: Checker, program: Program
    ) -> Ruling:
        given, answer = (text.encode(errors="replace") for text in (test.input, test.output))
        size = len(given) + len(output) + len(answer)
        roomy = replace(program, memory_bytes=program.memory_bytes + _ROOM * size)
        if checker.language != PYTHON:
            if self._commands is None:
                raise Unsupported(f"checkers in {checker.language} are not run here, only Python")
            limits = Limits(
                cpu_s=roomy.cpu_s,
                memory_mb=roomy.memory_bytes // _MIB,
                output_bytes=roomy.output_bytes,
            )
            files = [given, output, answer]
            return await self._commands.check(checker, files, limits, self._headers)
        payload = (checker.code, checker.form)
        job = roomy.job(Mode.CHECK, 1, payload)._replace(checked=[given, output, answer])
        ruling = await _ruling_of(job, roomy)
        if ruling.verdict in (Verdict.PASS, Verdict.WRONG_ANSWER):
            return ruling
        return Ruling(Verdict.TEST_ERROR, f"the checker failed: {ruling.message}")


async def _ruling_of(job: Job, program: Program) -> Ruling:
    (answer,) = (await program.run(job, read_judged)).answers
    return Ruling(answer.verdict, answer.message)
