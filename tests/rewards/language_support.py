"""A judge of other languages on an event loop of its own, which skips what the machine lacks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rewards_support import LIMITS

from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.binaries import Binaries
from async_rl.rewards.verifier.checks import Ruling
from async_rl.rewards.verifier.command_judging import CommandJudge
from async_rl.rewards.verifier.languages import LanguageRefused
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.warm_cells import Unsafe, WarmCells


async def exact(test: StdinTest, output: bytes) -> Ruling:
    """A stand-in for the server's own rules, which have tests of their own."""
    if output.decode().strip() == test.output.strip():
        return Ruling(Verdict.PASS)
    return Ruling(Verdict.WRONG_ANSWER, f"printed {output.decode()[:80]!r}")


class Languages:
    """Judges programs one at a time. directory: of compiled programs."""

    def __init__(self, directory: Path | None) -> None:
        self.runner = asyncio.Runner()
        try:
            self.level, self.reasons = self.runner.run(_level())
        except Unsafe as error:
            pytest.skip(str(error))
        self.judge = CommandJudge(1, self.level, self.reasons, Binaries(directory))

    def need(self, language: str) -> None:
        """Skip the test with the reason why programs in the language cannot be judged here."""
        try:
            self.runner.run(self.judge.require(language))
        except LanguageRefused as error:
            pytest.skip(str(error))

    def results(
        self, language: str, code: str, *tests: tuple[str, str], **request: Any
    ) -> list[TestResult]:
        """One result per (input, expected output)."""
        self.need(language)
        given = [StdinTest(input=text, output=output) for text, output in tests or [("", "")]]
        program = VerifyRequest(
            code=code, language=language, tests=given, stop_at_first_failure=False, **request
        )
        return self.runner.run(self.judge.verify(program, LIMITS, exact)).tests

    def output(self, language: str, code: str, stdin: str = "", **request: Any) -> str:
        """What a program prints; the test fails if it does not end well."""
        self.need(language)
        program = VerifyRequest(
            code=code, language=language, tests=[StdinTest(input="", output="")], **request
        )
        ran = self.runner.run(self.judge.run(program, stdin, LIMITS))
        assert ran.verdict == "pass", ran
        return ran.output.decode()

    def close(self) -> None:
        self.runner.run(self.judge.close())
        self.runner.close()


async def _level() -> tuple[int, list[str]]:
    async with await WarmCells.start(1) as cells:
        return cells.level, cells.reasons
