"""Judges programs that are not Python: from the source and its standard inputs to results.

Each test runs the program in a separate process, which gets its input and nothing else; the output
is compared here, outside the jail, as for Python (`rulings.py`).
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.core.errors import InfrastructureError, Unsupported
from async_rl.core.output_rules import Checker
from async_rl.core.types import Verdict
from async_rl.rewards.memo import Memo
from async_rl.rewards.verifier.compiling import Compiled, Compiler
from async_rl.rewards.verifier.languages import Toolchain, table
from async_rl.rewards.verifier.outcomes import MIB, Ran, Ruling, never_ran, read_check, read_command
from async_rl.rewards.verifier.program import NO_CELL, Ask, Limits, Program, tried
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.cell import command
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES, CommandSpec, Profile

_LIMITS = {"address_space": resource.RLIMIT_AS, "data": resource.RLIMIT_DATA}
# As the scratch of a Python cell.
_SCRATCH_BYTES = 16 << 20
_CHECKED = ("input", "output", "answer")
# Generous: a refused language stays refused until the verifier starts again.
_PROBE_LIMITS = Limits(cpu_s=10, memory_bytes=256 * MIB, output_bytes=1024)


class CommandJudge:
    """Judges programs in the languages of the table.

    level: of the jail of this machine; below namespaces every language is refused.
    """

    def __init__(self, num_cells: int, level: int, reasons: Sequence[str]) -> None:
        self._num_cells, self._level, self._reasons = num_cells, level, reasons
        self._rows = table()
        self._known = Memo[Compiler | str](size=len(self._rows), lasts=lambda _: True)
        self._compilers: list[Compiler] = []

    async def require(self, language: str) -> Compiler:
        """The compiler of a language. The first time, its probe is compiled and run.

        Raises Unsupported with the reason.
        """
        known = await self._known.get(language.encode(), lambda: self._probed(language))
        if isinstance(known, str):
            raise Unsupported(known)
        return known

    async def _probed(self, language: str) -> Compiler | str:
        """The compiler, or the reason why programs in the language cannot be judged."""
        if self._level != NAMESPACES:
            return (
                f"programs in {language} need a jail of level {NAMESPACES} (namespaces), this one"
                f" has level {self._level}: without namespaces nothing bounds the processes and"
                f" files of a compiler ({'; '.join(self._reasons) or 'no reason known'})"
            )
        row = self._rows[language]
        try:
            toolchain = await asyncio.to_thread(Toolchain.find, language, row)
            cells = Cells.of_commands(self._num_cells, sorted(toolchain.visible()))
            compiler = Compiler(toolchain, cells)
            self._compilers.append(compiler)
            program = await compiler.program(row.probe)
            (answer,) = (await _run(compiler, program, "", _PROBE_LIMITS)).answers
        except InfrastructureError as error:
            return str(error)
        # A compiler may work on a machine whose jail stops its programs.
        if answer.output != b"ok\n":
            return (
                f"{row.tool} of this machine makes no program in {language} that runs in the jail:"
                f" {answer.ruling.message}"
            )
        return compiler

    async def asker(self, request: VerifyRequest, program: Program) -> Ask:
        """A function that runs the program on the standard input of one test.

        Raises InfrastructureError.
        """
        compiler = await self.require(request.language)
        compiled = await compiler.program(request.code)

        async def ask(tests: Sequence[Sequence[Any]]) -> Ran:
            ((test,),) = tests
            limits = program.limits.with_output_of([test])
            return await _run(compiler, compiled, test.input, limits)

        return ask

    async def check(
        self, checker: Checker, files: Sequence[bytes], limits: Limits, headers: Mapping[str, str]
    ) -> Ruling:
        """The ruling of a checker in C++. files: input, output and answer. headers: by name.

        Raises InfrastructureError.
        """
        compiler = await self.require(checker.language)
        program = await compiler.program(checker.code, headers)
        if isinstance(program.product, str):
            hint = "" if headers else " (sandbox.checker_headers names no headers)"
            reason = f"the checker does not compile{hint}: {program.product}"
            return Ruling(Verdict.TEST_ERROR, reason)
        arguments, stdin = _CHECKED, b""
        if checker.form == "kattis":
            # The feedback directory is the working directory.
            arguments, stdin = ("input", "answer", "./"), files[1]
        spec = _spec(compiler.toolchain, program, limits)._replace(
            arguments=["checker", *arguments],
            files=list(_CHECKED),
            product="judgemessage.txt",
            # The files are copied into the scratch, and the checker may write as much.
            scratch_bytes=_SCRATCH_BYTES + 2 * sum(map(len, files)),
        )
        return await tried(
            compiler.cells,
            command(spec, stdin, [program.content, *files], 0),
            lambda outcome: read_check(outcome, spec, checker.form, limits.output_bytes),
            NO_CELL,
        )

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return sum(compiler.cells.num_replaced for compiler in self._compilers)

    async def close(self) -> None:
        """Cancel compilations and end the cells."""
        await self._known.close()
        for compiler in self._compilers:
            await compiler.close()


async def _run(compiler: Compiler, program: Compiled, stdin: str, limits: Limits) -> Ran:
    """Run a program once; its compile error is the result of each run."""
    product, run = program.product, compiler.toolchain.row.run
    if isinstance(product, str):
        return never_ran(Ruling(Verdict.COMPILE_ERROR, product))
    spec, output_bytes = _spec(compiler.toolchain, program, limits), limits.output_bytes
    return await tried(
        compiler.cells,
        command(spec, stdin.encode(errors="replace"), [program.content], output_bytes + 1),
        lambda outcome: read_command(
            outcome, spec, output_bytes=output_bytes, memory_marks=run.memory_marks
        ),
        NO_CELL,
    )


def _spec(toolchain: Toolchain, program: Compiled, limits: Limits) -> CommandSpec:
    """The command that runs the program once."""
    run = toolchain.row.run
    places = {**program.names, "memory_mb": str(limits.memory_bytes // MIB)}
    memory = limits.memory_bytes + run.extra_mb * MIB
    files, scratch_bytes = [], _SCRATCH_BYTES
    if run.program:
        # The program is a file for its runtime: its source, or the archive that was compiled.
        is_source = toolchain.row.compile is None
        files = toolchain.fill([toolchain.row.source], places) if is_source else ["program"]
        # The program is a file in the scratch, and must leave the usual room.
        scratch_bytes += 2 * len(program.product)
    return toolchain.command(
        run,
        places,
        profile=Profile.TOOLS if run.tools else Profile.PROGRAM,
        files=files,
        product="",
        cpu_s=limits.cpu_s + run.startup_s,
        memory_bytes=memory,
        process_limits=[(_LIMITS[run.limit], memory + run.reserve_mb * MIB)],
        # One byte more, so that an output above the limit can be recognized.
        file_bytes=limits.output_bytes + 1,
        scratch_bytes=scratch_bytes,
    )
