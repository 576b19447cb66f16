"""Decides whether the output of a program is right: here if it is small, otherwise in a cell.

A program controls how long its output takes to decode and compare, so a large value never enters
the server's process: `sandbox/comparison.py` compares it in a child with the program's own limits.
A row's checker always runs in a cell.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from async_rl.config.rewards import SandboxConfig
from async_rl.core.errors import ConfigError
from async_rl.core.programs import PYTHON, Checker
from async_rl.core.types import AssertTest, StdinTest, Verdict
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.outcomes import Ran, Ruling, rejected, result_of
from async_rl.rewards.verifier.program import Program, Question
from async_rl.rewards.verifier.protocol import TestResult
from async_rl.sandbox.cell import packed
from async_rl.sandbox.comparison import Comparison, Printed, Returned, failure
from async_rl.sandbox.protocol import Mode

LARGE_BYTES = 1 << 16
"""The most that is decoded in the server's process for one test."""
# Memory of a decoded value, in multiples of its bytes.
_ROOM = 40

_RIGHT = Ruling(Verdict.PASS)


class Rulings:
    """Rulings by the settings of a verifier. commands: runs checkers in C++."""

    def __init__(self, config: SandboxConfig, commands: CommandJudge) -> None:
        self._commands, self._headers = commands, load_headers(config.checker_headers)
        self._comparison = Comparison(relative_tolerance=config.float_tolerance)

    async def of(self, question: Question, body: bytes, program: Program) -> Ruling:
        """The ruling on a returned value or a printed text. Raises InfrastructureError."""
        if isinstance(question, AssertTest):
            return _RIGHT  # a judging child has decided
        emitted: Returned | Printed
        if isinstance(question, StdinTest):
            # The row knows its problem better than the configuration.
            if question.checker is not None:
                return await self._checked(question, body, question.checker, program)
            # Most right programs print exactly this, and it may be large.
            if body == question.output.encode(errors="replace"):
                return _RIGHT
            rules = msgspec.structs.astuple(question.rules)
            emitted, size = Printed(body, question.output, rules), len(body) + len(question.output)
        else:
            emitted, size = Returned(body, *question), len(body)
        # A child costs 2 ms, and most values are small.
        if size <= LARGE_BYTES:
            message = failure(emitted, self._comparison)
            return Ruling(Verdict.WRONG_ANSWER, message) if message else _RIGHT
        limits = program.limits.with_memory(_ROOM * size)
        tolerance = self._comparison.relative_tolerance
        ran = await program.run(Mode.COMPARE, tolerance, tuple(emitted), limits=limits)
        return ran.answers[0].ruling

    async def _checked(
        self, test: StdinTest, output: bytes, checker: Checker, program: Program
    ) -> Ruling:
        given, answer = (text.encode(errors="replace") for text in (test.input, test.output))
        files = [given, output, answer]
        limits = program.limits.with_memory(_ROOM * sum(map(len, files)))
        if checker.language != PYTHON:
            return await self._commands.check(checker, files, limits, self._headers)
        ran = await program.run(Mode.CHECK, checker.code, checker.form, limits=limits, files=files)
        ruling = _decision(ran)
        is_final = ruling.verdict in (Verdict.PASS, Verdict.TEST_ERROR)
        return ruling if is_final else rejected(ruling.message)

    async def interact(self, test: StdinTest, checker: Checker, program: Program) -> TestResult:
        """Run a program and its checker side by side. Raises InfrastructureError."""
        given, answer = (text.encode(errors="replace") for text in (test.input, test.output))
        files = [packed((checker.code, checker.form)), given, answer]
        ran = await program.run(Mode.INTERACT, program.code, files=files)
        return result_of(_decision(ran), ran.reply)


def _decision(ran: Ran) -> Ruling:
    """The ruling of the child of a checker."""
    verdict, message = ran.answers[0].ruling
    if verdict is Verdict.COMPILE_ERROR:
        return Ruling(Verdict.TEST_ERROR, f"the checker does not compile: {message}")
    return Ruling(verdict, message if verdict is not Verdict.PASS else "")


def load_headers(directory: str | None) -> dict[str, str]:
    """The files of `sandbox.checker_headers` by name. Raises ConfigError."""
    if directory is None:
        return {}
    try:
        files = [file for file in Path(directory).iterdir() if file.is_file()]
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sandbox.checker_headers={directory}: {error}; give a directory with only headers"
        ) from error
