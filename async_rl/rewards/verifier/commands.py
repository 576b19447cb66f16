"""Judges programs that are not Python: from the source and its standard inputs to results.

Each test runs the program in a separate process, which gets its input and nothing else; the output
is compared outside the jail, as for Python (`judging.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.core.errors import ConfigError, InfrastructureError, Unsupported
from async_rl.core.programs import Checker
from async_rl.rewards.memo import Memo
from async_rl.rewards.verifier.compiling import Compiler
from async_rl.rewards.verifier.languages import places_of, table
from async_rl.rewards.verifier.outcomes import MIB, Ran, Ruling
from async_rl.rewards.verifier.program import Ask, Limits, Program, Run, ran_of
from async_rl.sandbox.protocol import NAMESPACES

# Generous: a refused language stays refused until the verifier starts again.
_PROBE_LIMITS = Limits(cpu_s=10, memory_bytes=256 * MIB, output_bytes=1024)


class CommandJudge:
    """Judges programs in the languages of the table.

    level: of the jail of this machine; below namespaces every language is refused. headers: for
    checkers, by name.
    """

    def __init__(
        self, num_cells: int, level: int, reasons: Sequence[str], headers: Mapping[str, str]
    ) -> None:
        self._num_cells = num_cells
        self._level = level
        self._reasons = reasons
        self._headers = headers
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
            places = await asyncio.to_thread(places_of, language, row)
            compiler = Compiler(row, places, self._num_cells)
            self._compilers.append(compiler)
            program = await compiler.program(row.probe)
            (answer,) = (await ran_of(compiler.run(program, "", _PROBE_LIMITS))).answers
        except InfrastructureError as error:
            return str(error)
        # A compiler may work on a machine whose jail stops its programs.
        if answer.output != b"ok\n":
            return (
                f"{row.tool} of this machine makes no program in {language} that runs in the jail:"
                f" {answer.ruling.message}"
            )
        return compiler

    async def asker(self, program: Program) -> Ask:
        """Runs of the program on the standard input of one test. Raises InfrastructureError."""
        compiler = await self.require(program.request.language)
        compiled = await compiler.program(program.request.code)

        def ask(tests: Sequence[Sequence[Any]]) -> Run[Ran] | Ran:
            ((test,),) = tests
            limits = program.limits.with_output_of([test])
            return compiler.run(compiled, test.input, limits)

        return ask

    async def check(
        self, checker: Checker, files: Sequence[bytes], limits: Limits
    ) -> Run[Ruling] | Ruling:
        """One run of a checker, as of Compiler. Raises InfrastructureError."""
        compiler = await self.require(checker.language)
        program = await compiler.program(checker.code, self._headers)
        return compiler.check(program, checker, files, limits)

    @property
    def num_replaced(self) -> int:
        """Cells that broke and were replaced."""
        return sum(compiler.cells.num_replaced for compiler in self._compilers)

    async def close(self) -> None:
        """Cancel compilations and end the cells."""
        await self._known.close()
        for compiler in self._compilers:
            await compiler.close()


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
