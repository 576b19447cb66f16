"""Programs of other languages: compiles them in a jail, remembers the products, and runs them.

Each test runs the program in a separate process, which gets its input alone; the output is compared
outside the jail (`judging.py`). A command names exactly the paths that it may read and execute.

Invariants: sources that arrive at the same time and are equal are compiled once; a compile error
counts against the program, a compiler that was stopped from outside does not and is tried again. A
key names the sources and the command, so a program only gets the product compiled from its source.
Products are in memory only: no file can be changed between a compilation and a run.
"""

import asyncio
import glob
import hashlib
import os
import re
import resource
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.core.errors import ConfigError, InfrastructureError, Unsupported
from async_rl.core.programs import Checker
from async_rl.core.records import read_packaged
from async_rl.core.types import Verdict
from async_rl.rewards.memo import Memo
from async_rl.rewards.verifier.languages import LanguageRow, Step, places_of, source_names
from async_rl.rewards.verifier.outcomes import (
    MIB,
    NEVER_RAN,
    Answer,
    Ran,
    Ruling,
    ended,
    printable,
    read_check,
    read_command,
)
from async_rl.rewards.verifier.program import Ask, Limits, Program, Run, ran_of, tried
from async_rl.sandbox.cell import CellFailed, Executable, Outcome, command
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import NAMESPACES, CommandSpec, Ending, Profile

# Contests allow 64 KB.
MAX_SOURCE_BYTES = 1 << 20
# A static program of C++ or Go has about 2 MB, and each is copied into memory for a run.
MAX_PRODUCT_BYTES = 64 << 20
MESSAGE_CHARS = 2000
_FILE_BYTES = 128 << 20
# As the scratch of a Python cell.
SCRATCH_BYTES = 16 << 20
_ARGUMENTS = {"kattis": ("input", "answer", "./"), "testlib": ("input", "output", "answer")}
_ENVIRONMENT = (
    "PATH=/usr/bin:/bin",
    "HOME=/tmp",
    "TMPDIR=/tmp",
    "PWD=/tmp",
    "LC_ALL=C.UTF-8",
    "TZ=UTC",
)
# The kernel executes it for programs that are linked dynamically, so Landlock must allow it.
_LOADER = "/lib64/ld-linux-x86-64.so.2"
# Groups judged at the same time: equal programs come from one group. A static program has 2 MB; a
# larger one is made again, so that no source decides how much memory the verifier takes.
_REMEMBERED = 64
_MAX_REMEMBERED_BYTES = 4 << 20
# Generous: a refused language stays refused until the verifier starts again.
_PROBE_LIMITS = Limits(cpu_s=10, memory_bytes=256 * MIB, output_bytes=1024)

Product = bytes | str
"""A compiled program, or the reason why there is none: a bounded part of the compiler's output."""


class Compiled(NamedTuple):
    """A program that is ready to run: an executable, an archive or the source itself.

    content: the product, sealed if it runs by itself; names: of `source_names`.
    """

    content: Product | Executable
    names: dict[str, str]


class Compiler:
    """Makes and runs programs of one language. places: of `places_of`; num_cells: for both;
    headers: for checkers, by name.
    """

    def __init__(
        self,
        row: LanguageRow,
        places: Mapping[str, str],
        num_cells: int,
        headers: Mapping[str, str],
    ) -> None:
        self.row = row
        self._headers = headers
        self._places = places
        steps = filter(None, (row.run, row.compile))
        visible = {path for step in steps for path in self._paths([*step.reads, *step.runs])}
        self.cells = Cells.of_commands(num_cells, sorted(visible))
        self._memo = Memo[Product](
            size=_REMEMBERED, lasts=lambda product: len(product) <= _MAX_REMEMBERED_BYTES
        )

    def _fill(self, texts: Sequence[str], more: Mapping[str, str] = {}) -> list[str]:
        """The texts with their placeholders replaced."""
        places = {**self._places, **more}
        return [re.sub(r"\{(\w+)\}", lambda match: places[match[1]], text) for text in texts]

    def _paths(self, patterns: Sequence[str]) -> list[str]:
        """The existing paths that the patterns name."""
        return [path for pattern in self._fill(patterns) for path in sorted(glob.glob(pattern))]

    def _command(self, step: Step, places: Mapping[str, str], **more: Any) -> CommandSpec:
        """The command of a step. places: further placeholders; more: the other fields."""
        (path,) = self._fill([step.program])
        return CommandSpec(
            executable=path,
            arguments=[path or "solution", *self._fill(step.arguments, places)],
            environment=[*_ENVIRONMENT, *self._fill(step.environment)],
            readable=self._paths(step.reads),
            runnable=[*self._paths(step.runs), os.path.realpath(_LOADER)] if path else [],
            **more,
        )

    async def program(self, code: str, headers: Mapping[str, str] = {}) -> Compiled:
        """The program of this source. headers: files that it may include, by name.

        Raises InfrastructureError.
        """
        content = code.encode(errors="replace")
        names = source_names(code)
        product: Product = content
        step = self.row.compile
        if len(content) > MAX_SOURCE_BYTES:
            product = f"the program has {len(content)} bytes, more than {MAX_SOURCE_BYTES}"
        elif step is not None:
            texts = [content, *(text.encode() for text in headers.values())]
            spec = self._command(
                step,
                names,
                profile=Profile.TOOLS,
                files=[*self._fill([self.row.source], names), *headers],
                product=step.product,
                cpu_s=step.cpu_s,
                memory_bytes=step.memory_mb * MIB,
                process_limits=[],
                file_bytes=_FILE_BYTES,
                scratch_bytes=step.scratch_mb * MIB,
            )
            key = hashlib.sha256(repr((spec, texts)).encode()).digest()
            work = command(spec, b"", texts, MESSAGE_CHARS)
            once = Run(self.cells, work, partial(_product, spec=spec)).once
            product = await self._memo.get(key, partial(tried, once))
        if isinstance(product, str) or self.row.run.program:
            return Compiled(product, names)
        # Sealed once for all tests of the program; in a thread, because it copies megabytes.
        return Compiled(await asyncio.to_thread(Executable, product), names)

    def run(self, program: Compiled, stdin: str, limits: Limits) -> Run[Ran] | Ran:
        """One run of a program; its compile error is the result of each run."""
        if isinstance(program.content, str):
            return Ran(NEVER_RAN, [Answer(Ruling(Verdict.COMPILE_ERROR, program.content))])
        spec = self._spec(program, limits)
        work = command(spec, stdin.encode(errors="replace"), [program.content], spec.file_bytes)
        read = partial(read_command, spec=spec, memory_marks=self.row.run.memory_marks)
        return Run(self.cells, work, read)

    async def check(
        self, checker: Checker, files: Sequence[bytes], limits: Limits
    ) -> Run[Ruling] | Ruling:
        """One run of a checker. files: input, output (empty if it interacts) and answer.

        Raises InfrastructureError.
        """
        program = await self.program(checker.code, self._headers)
        if isinstance(program.content, str):
            return Ruling(Verdict.TEST_ERROR, f"the checker does not compile: {program.content}")
        spec = self._spec(program, limits)
        spec = spec._replace(
            # The feedback directory is the working directory.
            arguments=[*spec.arguments, *_ARGUMENTS[checker.form]],
            files=[*spec.files, "input", "output", "answer"],
            product="judgemessage.txt",
            # The files are copied into the scratch, and the checker may write as much.
            scratch_bytes=spec.scratch_bytes + 2 * sum(map(len, files)),
        )
        work = command(spec, files[1], [program.content, *files], 0)
        return Run(self.cells, work, partial(read_check, spec=spec, form=checker.form))

    def _spec(self, program: Compiled, limits: Limits) -> CommandSpec:
        """The command that runs the program once."""
        run = self.row.run
        places = {**program.names, "memory_mb": str(limits.memory_bytes // MIB)}
        memory = limits.memory_bytes + run.extra_mb * MIB
        files = []
        scratch_bytes = SCRATCH_BYTES
        if isinstance(program.content, bytes):
            # The program is a file for its runtime: its source, or the archive that was compiled.
            files = ["program"] if self.row.compile else self._fill([self.row.source], places)
            # The program is a file in the scratch, and must leave the usual room.
            scratch_bytes += 2 * len(program.content)
        return self._command(
            run,
            places,
            profile=Profile.TOOLS if run.tools else Profile.PROGRAM,
            files=files,
            product="",
            cpu_s=limits.cpu_s + run.startup_s,
            memory_bytes=memory,
            process_limits=[(getattr(resource, run.limit), memory + run.reserve_mb * MIB)],
            # One byte more, so that an output above the limit can be recognized.
            file_bytes=limits.output_bytes + 1,
            scratch_bytes=scratch_bytes,
        )

    async def close(self) -> None:
        """Cancel the compilations that are running, and end the cells."""
        await self._memo.close()
        await self.cells.close()


def _product(outcome: Outcome, spec: CommandSpec) -> Product:
    """The product of a compiler. Raises CellFailed if the program is not known to be the reason
    for its end.
    """
    reply, (output, errors, product) = outcome
    if reply.ending == Ending.WALL:
        raise CellFailed(f"after {reply.wall_s:.0f} s")
    if len(product) > MAX_PRODUCT_BYTES:
        return f"the program is larger than {MAX_PRODUCT_BYTES // MIB} MB"
    if reply.ending == Ending.EXITED and reply.code == 0 and product:
        return product
    text = printable(errors + output, MESSAGE_CHARS)
    if reply.ending == Ending.EXITED:
        return text or f"the compiler exited with {reply.code} and made no program"
    return f"the compiler: {ended(reply, spec, text).message}"


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
        self._rows = read_packaged(__package__, "languages.toml", dict[str, LanguageRow])
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
            compiler = Compiler(row, places, self._num_cells, self._headers)
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
        # In the order of their names: the same headers have the same key.
        files = [file for file in sorted(Path(directory).iterdir()) if file.is_file()]
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sandbox.checker_headers={directory}: {error}; give a directory with only headers"
        ) from error
