"""From a program that is not Python and its standard inputs to verdicts.

Each test runs the program in a separate process, which gets its input and nothing else; the
output is compared here, outside the jail, as for Python (`rulings.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from async_rl.config.rewards import SandboxConfig
from async_rl.core.errors import InfrastructureError, Unsupported
from async_rl.core.output_rules import Checker
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.binaries import Binaries
from async_rl.rewards.verifier.checks import Ruling, is_decided, with_rest
from async_rl.rewards.verifier.command_outcomes import (
    Limits,
    Ran,
    RunFault,
    check_spec,
    command_spec,
    read_check,
    read_run,
)
from async_rl.rewards.verifier.compiling import (
    CompileError,
    Compiler,
    Program,
)
from async_rl.rewards.verifier.languages import Toolchain, table
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest, VerifyResponse
from async_rl.sandbox.cell import CellFailed, Command, CommandOutcome, sealed_file
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES

T = TypeVar("T")
_TRIES = 2


RunOne = Callable[[str, Limits], Awaitable[Ran]]
Rule = Callable[[StdinTest, bytes], Awaitable[Ruling]]


@dataclass(slots=True)
class _Ready:
    """A language of this machine once its probe has passed, or the reason why it has not."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    toolchain: Toolchain | None = None
    refused: str = ""


class CommandJudge:
    """Judges programs in the languages of the table.

    level: of the jail of this machine; below namespaces every language is refused. binaries: the
    cache of compiled programs.
    """

    def __init__(
        self, num_cells: int, level: int, reasons: Sequence[str], binaries: Binaries
    ) -> None:
        self._num_cells, self._level, self._reasons = num_cells, level, reasons
        self._rows = table()
        self._ready = {language: _Ready() for language in self._rows}
        self._binaries = binaries
        self._cells: dict[str, Cells] = {}
        self._compilers: dict[str, Compiler] = {}

    async def require(self, language: str) -> Toolchain:
        """The toolchain of a language. The first time, its probe is compiled and run.

        Raises Unsupported with the reason.
        """
        ready = self._ready[language]
        async with ready.lock:
            if ready.toolchain is None and not ready.refused:
                try:
                    ready.toolchain = await self._probe(language)
                except Unsupported as error:
                    ready.refused = str(error)
        if ready.toolchain is None:
            raise Unsupported(ready.refused)
        return ready.toolchain

    async def _probe(self, language: str) -> Toolchain:
        if self._level != NAMESPACES:
            raise Unsupported(
                f"programs in {language} need a jail of level {NAMESPACES} (namespaces), this one"
                f" has level {self._level}: without namespaces nothing bounds the processes and"
                f" files of a compiler ({'; '.join(self._reasons) or 'no reason known'})"
            )
        row = self._rows[language]
        toolchain = await asyncio.to_thread(Toolchain.find, language, row)
        cells = Cells.of_commands(self._num_cells, sorted(toolchain.visible()))
        self._cells[language] = cells
        self._compilers[language] = Compiler(cells, self._binaries)
        limits = Limits(cpu_s=10, memory_mb=256, output_bytes=1024)
        try:
            program = await self._compilers[language].program(toolchain, row.probe)
            async with self._loaded(program) as run:
                ran = await run("", limits)
        except (CompileError, InfrastructureError) as error:
            raise Unsupported(
                f"{row.tool} on this machine cannot compile a program in {language}: {error}"
            ) from error
        if ran.output != b"ok\n":
            raise Unsupported(
                f"a program in {language} does not run in the jail of this machine: {ran.message}"
            )
        return toolchain

    async def verify(
        self, request: VerifyRequest, config: SandboxConfig, rule: Rule
    ) -> VerifyResponse:
        """Verdicts of one program. rule: decides about an output. Raises InfrastructureError."""
        stop = request.stop_at_first_failure
        stop = True if stop is None else stop
        tests = [test for test in request.tests if isinstance(test, StdinTest)]
        try:
            program = await self._program(request)
        except CompileError as error:
            failed = _result(Verdict.COMPILE_ERROR, str(error))
            results = [failed] if stop else [failed] * len(tests)
            return VerifyResponse(verdict=failed.verdict, tests=results, level=self._level)
        results = []
        async with self._loaded(program) as run_one:
            for test in tests:
                results.append(await _test(run_one, test, Limits.of(request, config), rule))
                if is_decided(results, stop=stop):
                    break
        results = with_rest(results, len(tests), stop=stop)
        failures = (each.verdict for each in results if each.verdict is not Verdict.PASS)
        verdict = next(failures, Verdict.PASS)
        return VerifyResponse(verdict=verdict, tests=results, level=self._level)

    async def run(self, request: VerifyRequest, stdin: str, config: SandboxConfig) -> Ran:
        """Run a program on one standard input. Raises InfrastructureError."""
        try:
            program = await self._program(request)
        except CompileError as error:
            return Ran(
                verdict=Verdict.COMPILE_ERROR, output=b"", message=str(error), cpu_s=0.0,
                wall_s=0.0, memory_mb=0.0,
            )  # fmt: skip
        async with self._loaded(program) as run_one:
            return await run_one(stdin, Limits.of(request, config))

    async def check(
        self, checker: Checker, files: Sequence[bytes], limits: Limits, headers: Mapping[str, str]
    ) -> Ruling:
        """The ruling of a checker in C++. files: input, output and answer. headers: by name.

        Raises InfrastructureError.
        """
        toolchain = await self.require(checker.language)
        try:
            compiler = self._compilers[checker.language]
            program = await compiler.program(toolchain, checker.code, headers)
        except CompileError as error:
            hint = "" if headers else " (sandbox.checker_headers names no headers)"
            return Ruling(Verdict.TEST_ERROR, f"the checker does not compile{hint}: {error}")
        spec = check_spec(program, limits, checker.form, files)
        binary = await asyncio.to_thread(sealed_file, program.content)
        try:
            stdin = files[1] if checker.form == "kattis" else b""
            return await self._tried(
                checker.language,
                Command(spec, stdin, files, 0, binary),
                lambda outcome: read_check(outcome, checker.form, program, spec, limits),
            )
        finally:
            os.close(binary)

    async def _program(self, request: VerifyRequest) -> Program:
        toolchain = await self.require(request.language)
        return await self._compilers[request.language].program(toolchain, request.code)

    @contextlib.asynccontextmanager
    async def _loaded(self, program: Program) -> AsyncIterator[RunOne]:
        """A function that runs the program once."""
        language, files = program.toolchain.language, [program.content]
        binary: int | None = None
        if not program.toolchain.row.run.program:
            binary, files = await asyncio.to_thread(sealed_file, program.content), []

        async def run_one(stdin: str, limits: Limits) -> Ran:
            spec = command_spec(program, limits)
            data = stdin.encode(errors="replace")
            command = Command(spec, data, files, limits.output_bytes + 1, binary)
            return await self._tried(
                language, command, lambda outcome: read_run(outcome, program, spec, limits)
            )

        try:
            yield run_one
        finally:
            if binary is not None:
                os.close(binary)

    async def _tried(
        self, language: str, command: Command, read: Callable[[CommandOutcome], T]
    ) -> T:
        problem = ""
        for _ in range(_TRIES):
            try:
                return read(await self._cells[language].run(command))
            except (CellFailed, RunFault) as error:
                problem = str(error)
        raise InfrastructureError(f"no cell could run the program, tried {_TRIES} times: {problem}")

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return sum(cells.num_replaced for cells in self._cells.values())

    async def close(self) -> None:
        """Cancel compilations and end the cells."""
        for compiler in self._compilers.values():
            await compiler.close()
        for cells in self._cells.values():
            await cells.close()


async def _test(run_one: RunOne, test: StdinTest, limits: Limits, rule: Rule) -> TestResult:
    # A right answer must fit, whatever the limit is.
    roomy = max(limits.output_bytes, 2 * len(test.output.encode(errors="replace")))
    ran = await run_one(test.input, replace(limits, output_bytes=roomy))
    if ran.verdict is not Verdict.PASS:
        return _result(ran.verdict, ran.message, ran)
    ruling = await rule(test, ran.output)
    return _result(ruling.verdict, ruling.message, ran)


def _result(verdict: Verdict, message: str, ran: Ran | None = None) -> TestResult:
    return TestResult(
        verdict=verdict,
        cpu_s=ran.cpu_s if ran else 0.0,
        wall_s=ran.wall_s if ran else 0.0,
        memory_mb=ran.memory_mb if ran else 0.0,
        message=message,
    )
