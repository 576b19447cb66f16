"""From source code to a program that can run: finds the toolchain, compiles in a jail, and keeps
the product.

Invariants: equal sources are compiled once, even if they arrive at the same time; a compile error
counts against the program, a compiler that was stopped from outside does not and is tried again.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import frozen
from async_rl.rewards.verifier.binaries import Binaries, key_of
from async_rl.rewards.verifier.languages import Compile, Toolchain, source_names
from async_rl.sandbox.cell import CellFailed, Command, CommandOutcome
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import CommandSpec, Ending, Profile

MAX_SOURCE_BYTES = 1 << 20
MAX_PRODUCT_BYTES = 64 << 20
MESSAGE_CHARS = 2000
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "PWD": "/tmp", "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}  # fmt: skip
_TRIES = 2
_MAX_TASKS = 64
_MAX_REMEMBERED_ERRORS = 1024
_FILE_BYTES = 128 << 20
_MIB = 1 << 20
_FORM = "1"
"""Changes when the way to compile changes, so that older programs are not used."""
_UNPRINTABLE = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")


@frozen
class Program:
    """A program that is ready to run. content: an executable, an archive or the source itself."""

    toolchain: Toolchain
    content: bytes
    names: dict[str, str]


@frozen
class _Source:
    """The input of a compilation, and the key of its product."""

    key: str
    toolchain: Toolchain
    step: Compile
    code: bytes
    headers: Mapping[str, str]
    names: dict[str, str]


class CompileError(Exception):
    """The program does not compile. The message is a bounded part of what the compiler printed."""


class Compiler:
    """Makes programs."""

    def __init__(self, cells: Cells, binaries: Binaries) -> None:
        self._cells, self._binaries = cells, binaries
        self._running: dict[str, asyncio.Task[bytes]] = {}
        self._errors: OrderedDict[str, str] = OrderedDict()

    async def program(
        self, toolchain: Toolchain, code: str, headers: Mapping[str, str] | None = None
    ) -> Program:
        """The program of this source. headers: files that it may include, by name.

        Raises CompileError, InfrastructureError.
        """
        headers = headers or {}
        source = code.encode(errors="replace")
        if len(source) > MAX_SOURCE_BYTES:
            raise CompileError(f"the program has {len(source)} bytes, more than {MAX_SOURCE_BYTES}")
        step, names = toolchain.row.compile, source_names(code)
        if step is None:
            return Program(toolchain=toolchain, content=source, names=names)
        arguments = toolchain.fill([step.program, *step.arguments], names)
        environment = toolchain.fill(step.environment)
        included = [text for header in sorted(headers.items()) for text in header]
        parts = [*arguments, *environment, code, *included]
        key = key_of(_FORM, toolchain.language, toolchain.version, *parts)
        content = self._binaries.get(key)
        if content is None:
            if key in self._errors:
                raise CompileError(self._errors[key])
            content = await self._once(
                _Source(
                    key=key,
                    toolchain=toolchain,
                    step=step,
                    code=source,
                    headers=headers,
                    names=names,
                )
            )
        return Program(toolchain=toolchain, content=content, names=names)

    async def _once(self, source: _Source) -> bytes:
        """Compile, or wait for the compilation of the same source."""
        if source.key not in self._running:
            task = asyncio.create_task(self._compile(source), name="compile")
            # Every waiter may be cancelled. Read the exception anyway: asyncio reports one that is
            # never read, and the tests treat such a report as an error.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running[source.key] = task
        return await asyncio.shield(self._running[source.key])

    async def _compile(self, source: _Source) -> bytes:
        contents = [source.code, *(text.encode() for text in source.headers.values())]
        command = Command(_spec(source), b"", contents, MESSAGE_CHARS)
        problem: object = None
        try:
            for _ in range(_TRIES):
                try:
                    outcome = await self._cells.run(command)
                    content = _product(outcome, source.step)
                except (CellFailed, _Stopped) as error:
                    problem = error
                    continue
                await asyncio.to_thread(self._binaries.put, source.key, content)
                return content
        except CompileError as error:
            self._errors[source.key] = str(error)
            if len(self._errors) > _MAX_REMEMBERED_ERRORS:
                self._errors.popitem(last=False)
            raise
        finally:
            del self._running[source.key]
        raise InfrastructureError(
            f"the compiler of {source.toolchain.language} was stopped from outside, tried {_TRIES}"
            f" times: {problem}"
        )

    async def close(self) -> None:
        """Cancel the compilations that are running."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Stopped(Exception):
    """The compiler was killed, and the program is not known to be the reason."""


def _spec(source: _Source) -> CommandSpec:
    toolchain, step, names = source.toolchain, source.step, source.names
    (executable,) = toolchain.fill([step.program])
    pairs = (text.split("=", 1) for text in toolchain.fill(step.environment))
    return CommandSpec(
        profile=Profile.TOOLS,
        executable=executable,
        arguments=[executable, *toolchain.fill(step.arguments, names)],
        environment={**ENVIRONMENT, **dict(pairs)},
        files=[*toolchain.fill([toolchain.row.source], names), *source.headers],
        product=step.product,
        readable=toolchain.paths(step.reads),
        runnable=toolchain.runnable(step.runs),
        cpu_s=step.cpu_s,
        sleep_s=step.cpu_s,
        memory_bytes=step.memory_mb * _MIB,
        address_space_bytes=0,
        data_bytes=0,
        file_bytes=_FILE_BYTES,
        scratch_bytes=step.scratch_mb * _MIB,
        max_tasks=_MAX_TASKS,
    )


def _product(outcome: CommandOutcome, step: Compile) -> bytes:
    """The compiled program. Raises CompileError, _Stopped."""
    reply = outcome.reply
    match reply.ending:
        case Ending.FAULT | Ending.CANCELLED | Ending.WALL:
            raise _Stopped(reply.fault.decode(errors="replace") or f"after {reply.wall_s:.0f} s")
        case Ending.CPU:
            raise CompileError(f"the compiler used more than {step.cpu_s:g} s of CPU time")
        case Ending.SIGNALED if reply.peak_bytes > step.memory_mb * _MIB:
            raise CompileError(f"the compiler used more than {step.memory_mb} MB")
    if len(outcome.product) > MAX_PRODUCT_BYTES:
        raise CompileError(f"the program is larger than {MAX_PRODUCT_BYTES // _MIB} MB")
    if reply.ending == Ending.EXITED and reply.code == 0 and outcome.product:
        return outcome.product
    text = printable(outcome.errors + outcome.output, MESSAGE_CHARS)
    raise CompileError(text or f"the compiler ended with {reply.code} and made no program")


def printable(data: bytes, num_chars: int) -> str:
    """The beginning of a text, without control characters."""
    text = data[: 4 * num_chars].decode(errors="replace").strip()
    return _UNPRINTABLE.sub("?", text)[:num_chars]
