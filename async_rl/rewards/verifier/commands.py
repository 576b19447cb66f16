"""Judges programs that are not Python: from the source and its standard inputs to results.

Each test runs the program in a separate process, which gets its input and nothing else; the output
is compared here, outside the jail, as for Python (`rulings.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from async_rl.core.errors import InfrastructureError, Unsupported
from async_rl.core.output_rules import Checker
from async_rl.core.types import StdinTest, Verdict
from async_rl.rewards.verifier.compiling import (
    Binaries,
    Compiled,
    CompileError,
    Compiler,
)
from async_rl.rewards.verifier.languages import Toolchain, table
from async_rl.rewards.verifier.outcomes import MIB, Ran, Ruling, read_check, read_command, result_of
from async_rl.rewards.verifier.program import NO_CELL, Limits, Program, Rule, tried
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.cell import Command, sealed_file
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES, CommandSpec, Profile

RunOne = Callable[[str, Limits], Awaitable[Ran]]
_LIMITS = {"address_space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
# As the scratch of a Python cell.
_SCRATCH_BYTES = 16 << 20
_CHECKED = ("input", "output", "answer")
# Generous: a refused language stays refused until the verifier starts again.
_PROBE_LIMITS = Limits(cpu_s=10, memory_bytes=256 * MIB, output_bytes=1024)


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
        # Requests that arrive together wait for one probe.
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
        try:
            program = await self._compilers[language].program(toolchain, row.probe)
            async with self._loaded(program) as run:
                result, output = await run("", _PROBE_LIMITS)
        except (CompileError, InfrastructureError) as error:
            raise Unsupported(
                f"{row.tool} on this machine cannot compile a program in {language}: {error}"
            ) from error
        # A compiler may work on a machine whose jail stops its programs.
        if output != b"ok\n":
            raise Unsupported(
                f"a program in {language} does not run in the jail of this machine:"
                f" {result.message}"
            )
        return toolchain

    async def results(
        self, request: VerifyRequest, program: Program, rule: Rule
    ) -> list[TestResult]:
        """Results of a program's tests. rule: decides about an output.

        Raises InfrastructureError.
        """
        tests = [test for test in request.tests if isinstance(test, StdinTest)]
        try:
            compiled = await self._compiled(request)
        except CompileError as error:
            failed = result_of(Ruling(Verdict.COMPILE_ERROR, str(error)))
            return [failed] if program.stop else [failed] * len(tests)
        results: list[TestResult] = []
        async with self._loaded(compiled) as run_one:
            for test in tests:
                limits = program.limits.with_output_of([test])
                result, output = await run_one(test.input, limits)
                if result.verdict is Verdict.PASS:
                    verdict, message = await rule(test, output)
                    result = replace(result, verdict=verdict, message=message)
                results.append(result)
                if program.is_decided(results):
                    break
        return program.with_rest(results, len(tests))

    async def run(self, request: VerifyRequest, stdin: str, limits: Limits) -> Ran:
        """Run a program on one standard input. Raises InfrastructureError."""
        try:
            program = await self._compiled(request)
        except CompileError as error:
            return result_of(Ruling(Verdict.COMPILE_ERROR, str(error))), b""
        async with self._loaded(program) as run_one:
            return await run_one(stdin, limits)

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
        arguments, stdin = _CHECKED, b""
        if checker.form == "kattis":
            # The feedback directory is the working directory.
            arguments, stdin = ("input", "answer", "./"), files[1]
        spec = _spec(program, limits)._replace(
            arguments=["checker", *arguments],
            files=list(_CHECKED),
            product="judgemessage.txt",
            # The files are copied into the scratch, and the checker may write as much.
            scratch_bytes=_SCRATCH_BYTES + 2 * sum(map(len, files)),
        )
        binary = await asyncio.to_thread(sealed_file, program.content)
        try:
            return await tried(
                self._cells[checker.language],
                Command(spec, stdin, files, 0, binary),
                lambda outcome: read_check(outcome, spec, checker.form, limits.output_bytes),
                NO_CELL,
            )
        finally:
            os.close(binary)

    async def _compiled(self, request: VerifyRequest) -> Compiled:
        toolchain = await self.require(request.language)
        return await self._compilers[request.language].program(toolchain, request.code)

    @contextlib.asynccontextmanager
    async def _loaded(self, program: Compiled) -> AsyncIterator[RunOne]:
        """A function that runs the program once."""
        toolchain, files = program.toolchain, [program.content]
        binary: int | None = None
        if not toolchain.row.run.program:
            # Sealed once for all tests of the program.
            binary, files = await asyncio.to_thread(sealed_file, program.content), []

        async def run_one(stdin: str, limits: Limits) -> Ran:
            spec, output_bytes = _spec(program, limits), limits.output_bytes
            data = stdin.encode(errors="replace")
            marks = toolchain.row.run.memory_marks
            return await tried(
                self._cells[toolchain.language],
                Command(spec, data, files, output_bytes + 1, binary),
                lambda outcome: read_command(
                    outcome, spec, output_bytes=output_bytes, memory_marks=marks
                ),
                NO_CELL,
            )

        try:
            yield run_one
        finally:
            if binary is not None:
                os.close(binary)

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


def _spec(program: Compiled, limits: Limits) -> CommandSpec:
    """The command that runs the program once."""
    toolchain, run = program.toolchain, program.toolchain.row.run
    places = {**program.names, "memory_mb": str(limits.memory_bytes // MIB)}
    (path,) = toolchain.fill([run.program])
    memory = limits.memory_bytes + run.extra_mb * MIB
    files, runnable, scratch_bytes = [], [], _SCRATCH_BYTES
    if path:
        # The program is a file for its runtime: its source, or the archive that was compiled.
        is_source = toolchain.row.compile is None
        files = toolchain.fill([toolchain.row.source], places) if is_source else ["program"]
        runnable = toolchain.runnable(run.runs)
        # The program is a file in the scratch, and must leave the usual room.
        scratch_bytes += 2 * len(program.content)
    return CommandSpec(
        profile=Profile.TOOLS if run.tools else Profile.PROGRAM,
        executable=path,
        arguments=[path or "solution", *toolchain.fill(run.arguments, places)],
        environment=toolchain.environment(run.environment),
        files=files,
        product="",
        readable=toolchain.paths(run.reads),
        runnable=runnable,
        cpu_s=limits.cpu_s + run.startup_s,
        memory_bytes=memory,
        process_limits=[(_LIMITS[run.limit], memory + run.reserve_mb * MIB)],
        # One byte more, so that an output above the limit can be recognized.
        file_bytes=limits.output_bytes + 1,
        scratch_bytes=scratch_bytes,
    )
