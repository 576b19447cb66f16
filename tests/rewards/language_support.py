"""A judge of other languages on an event loop of its own, which skips what the machine lacks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from rewards_support import LIMITS

from async_rl.core.errors import Unsupported
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.commands import CommandJudge
from async_rl.rewards.verifier.outcomes import Ran, Ruling
from async_rl.rewards.verifier.program import Limits, Program, ran_of
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cell import command
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.sandbox.protocol import CommandSpec, Profile


async def exact(test: StdinTest, output: bytes) -> Ruling:
    """A stand-in for the server's own rules, which have tests of their own."""
    if output.decode().strip() == test.output.strip():
        return Ruling(Verdict.PASS)
    return Ruling(Verdict.WRONG_ANSWER, f"printed {output.decode()[:80]!r}")


async def results_of(judge: CommandJudge, request: VerifyRequest) -> list[TestResult]:
    """The results of a program's tests, compared by `exact`."""
    program = program_of(request)
    tests = [[test] for test in request.tests if isinstance(test, StdinTest)]
    results = await program.results(tests, await judge.asker(program), exact, 1)
    return program.with_rest(results)


def program_of(request: VerifyRequest) -> Program:
    limits = Limits.of(request, LIMITS)
    return Program(request=request, cells=cast(Cells, None), limits=limits)


class Languages:
    """Judges programs one at a time."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        try:
            self.level, self.reasons = self.runner.run(_level())
        except Unsafe as error:
            pytest.skip(str(error))
        self.judge = CommandJudge(1, self.level, self.reasons, {})

    def need(self, language: str) -> None:
        """Skip the test with the reason why programs in the language cannot be judged here."""
        try:
            self.runner.run(self.judge.require(language))
        except Unsupported as error:
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
        return self.runner.run(results_of(self.judge, program))

    def output(self, language: str, code: str, stdin: str = "", **request: Any) -> str:
        """What a program prints; the test fails if it does not end well."""
        self.need(language)
        test = StdinTest(input=stdin, output="")
        asked = VerifyRequest(code=code, language=language, tests=[test], **request)

        async def run() -> Ran:
            return await ran_of((await self.judge.asker(program_of(asked)))([[test]]))

        (answer,) = self.runner.run(run()).answers
        assert answer.ruling.verdict == "pass", answer
        return answer.output.decode()

    @contextlib.contextmanager
    def limit_compiler(self, language: str, **limits: Any) -> Iterator[None]:
        """Smaller limits of a compiler, so that hostile sources end soon."""
        self.need(language)
        compiler = self.runner.run(self.judge.require(language))
        before = compiler.row
        assert before.compile is not None
        step = msgspec.structs.replace(before.compile, **limits)
        compiler.row = msgspec.structs.replace(before, compile=step)
        try:
            yield
        finally:
            compiler.row = before

    def product_of(self, script: str) -> bytes:
        """What a cell returns as the product of a script that runs as a compiler does."""
        self.need("c")
        cells = self.runner.run(self.judge.require("c")).cells
        spec = CommandSpec(
            profile=Profile.TOOLS, executable="/usr/bin/bash", arguments=["bash", "-c", script],
            environment=["PATH=/usr/bin"], files=[], product="solution", readable=["/usr"],
            runnable=["/usr"], cpu_s=2, memory_bytes=256 << 20, process_limits=[],
            file_bytes=1 << 20, scratch_bytes=16 << 20,
        )  # fmt: skip
        work = command(spec, b"", [], 1000)
        return self.runner.run(cells.run(work)).contents[2]

    def close(self) -> None:
        self.runner.run(self.judge.close())
        self.runner.close()


async def _level() -> tuple[int, list[str]]:
    async with await Cells.start(1) as cells:
        return cells.level, cells.reasons
