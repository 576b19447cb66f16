"""From source code to a program that can run: compiles it in a jail, and keeps the product in
memory and in a directory that outlives the process.

Invariants: equal sources are compiled once, even if they arrive at the same time; a compile error
counts against the program, a compiler that was stopped from outside does not and is tried again. A
key names the source, the compiler's version and its arguments, so a program only gets the product
compiled from its source. A file of the directory is written next to its place and renamed, and
starts with the digest of its content, so a torn or changed file is never run; nothing in a jail can
see the directory; it is bounded in size, and the files that were used last stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from async_rl.core.frozen import frozen
from async_rl.rewards.verifier.languages import Compile, Toolchain, source_names
from async_rl.rewards.verifier.outcomes import MIB, ChildFault, printable
from async_rl.rewards.verifier.program import tried
from async_rl.sandbox.cell import Command, CommandOutcome
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import CommandSpec, Ending, Profile

# Contests allow 64 KB.
MAX_SOURCE_BYTES = 1 << 20
# A static program of C++ or Go has about 2 MB, and each is copied into memory for a run.
MAX_PRODUCT_BYTES = 64 << 20
MESSAGE_CHARS = 2000
# Equal programs come from one group, at about the same time.
_MAX_REMEMBERED_ERRORS = 1024
_FILE_BYTES = 128 << 20
# Changes when the way to compile changes, so that older programs are not used.
_FORM = "2"
MAX_BYTES = 1 << 30
# About thirty static programs: the groups that are judged at the same time.
_MAX_MEMORY_BYTES = 64 << 20
_DIGEST_BYTES = 32
_SUFFIX = ".program"


@frozen
class Compiled:
    """A program that is ready to run. content: an executable, an archive or the source itself."""

    toolchain: Toolchain
    content: bytes
    names: dict[str, str]


class CompileError(Exception):
    """The program does not compile. The message is a bounded part of the compiler's output."""


class Compiler:
    """Makes programs."""

    def __init__(self, cells: Cells, binaries: Binaries) -> None:
        self._cells, self._binaries = cells, binaries
        self._running: dict[str, asyncio.Task[bytes]] = {}
        self._errors: OrderedDict[str, str] = OrderedDict()

    async def program(
        self, toolchain: Toolchain, code: str, headers: Mapping[str, str] | None = None
    ) -> Compiled:
        """The program of this source. headers: files that it may include, by name.

        Raises CompileError, InfrastructureError.
        """
        content, names = code.encode(errors="replace"), source_names(code)
        if len(content) > MAX_SOURCE_BYTES:
            raise CompileError(
                f"the program has {len(content)} bytes, more than {MAX_SOURCE_BYTES}"
            )
        step = toolchain.row.compile
        if step is not None:
            # In the order of their names: the same headers have the same key.
            included = dict(sorted((headers or {}).items()))
            texts = [content, *(text.encode() for text in included.values())]
            spec = _spec(toolchain, step, names, list(included))
            identity = (_FORM, toolchain.language, toolchain.version, spec, texts)
            key = hashlib.sha256(repr(identity).encode()).hexdigest()
            product = self._binaries.get(key)
            if product is None and key in self._errors:
                raise CompileError(self._errors[key])
            command = Command(spec, b"", texts, MESSAGE_CHARS)
            content = product or await self._once(key, command, toolchain.language)
        return Compiled(toolchain=toolchain, content=content, names=names)

    async def _once(self, key: str, command: Command, language: str) -> bytes:
        """Compile, or wait for the compilation of the same source."""
        if key not in self._running:
            task = asyncio.create_task(self._compile(key, command, language), name="compile")
            # Every waiter may be cancelled. Read the exception anyway: asyncio reports one that is
            # never read, and the tests treat such a report as an error.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running[key] = task
        # A waiter that is cancelled must not cancel the compilation of the other waiters.
        return await asyncio.shield(self._running[key])

    async def _compile(self, key: str, command: Command, language: str) -> bytes:
        failure = f"the compiler of {language} was stopped from outside"
        try:
            content = await tried(
                self._cells, command, lambda outcome: _product(outcome, command.spec), failure
            )
            # A write of megabytes would hold the event loop.
            await asyncio.to_thread(self._binaries.put, key, content)
            return content
        except CompileError as error:
            # In memory only: the limits of a busy machine may have been the reason.
            self._errors[key] = str(error)
            if len(self._errors) > _MAX_REMEMBERED_ERRORS:
                self._errors.popitem(last=False)
            raise
        finally:
            del self._running[key]

    async def close(self) -> None:
        """Cancel the compilations that are running."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _spec(
    toolchain: Toolchain, step: Compile, names: dict[str, str], headers: list[str]
) -> CommandSpec:
    (executable,) = toolchain.fill([step.program])
    return CommandSpec(
        profile=Profile.TOOLS,
        executable=executable,
        arguments=[executable, *toolchain.fill(step.arguments, names)],
        environment=toolchain.environment(step.environment),
        files=[*toolchain.fill([toolchain.row.source], names), *headers],
        product=step.product,
        readable=toolchain.paths(step.reads),
        runnable=toolchain.runnable(step.runs),
        cpu_s=step.cpu_s,
        memory_bytes=step.memory_mb * MIB,
        process_limits=[],
        file_bytes=_FILE_BYTES,
        scratch_bytes=step.scratch_mb * MIB,
    )


def _product(outcome: CommandOutcome, spec: CommandSpec) -> bytes:
    """The compiled program. Raises CompileError, or ChildFault if the
    program is not known to be the reason."""
    reply = outcome.reply
    match reply.ending:
        case Ending.FAULT | Ending.CANCELLED | Ending.WALL:
            raise ChildFault(reply.fault or f"after {reply.wall_s:.0f} s")
        case Ending.CPU:
            raise CompileError(f"the compiler used more than {spec.cpu_s:g} s of CPU time")
        case Ending.SIGNALED if reply.peak_bytes > spec.memory_bytes:
            raise CompileError(f"the compiler used more than {spec.memory_bytes // MIB} MB")
    if len(outcome.product) > MAX_PRODUCT_BYTES:
        raise CompileError(f"the program is larger than {MAX_PRODUCT_BYTES // MIB} MB")
    if reply.ending == Ending.EXITED and reply.code == 0 and outcome.product:
        return outcome.product
    text = printable(outcome.errors + outcome.output, MESSAGE_CHARS)
    raise CompileError(text or f"the compiler exited with {reply.code} and made no program")


class Binaries:
    """The cache. directory: None keeps programs in memory only.

    Also None in effect if the directory cannot be made, or if another user could write to it.
    """

    def __init__(self, directory: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory if directory and _is_private(directory) else None
        self._max_bytes = max_bytes
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0

    def get(self, key: str) -> bytes | None:
        """The program, or None."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        content = self._read(key)
        if content is not None:
            self._remember(key, content)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep a program. A directory that cannot be written keeps nothing."""
        self._remember(key, content)
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            self._write(self._directory, key, content)
            self._evict(self._directory)

    def _remember(self, key: str, content: bytes) -> None:
        self._memory_bytes += len(content) - len(self._memory.pop(key, b""))
        self._memory[key] = content
        while self._memory_bytes > _MAX_MEMORY_BYTES and len(self._memory) > 1:
            _, dropped = self._memory.popitem(last=False)
            self._memory_bytes -= len(dropped)

    def _read(self, key: str) -> bytes | None:
        if self._directory is None:
            return None
        path = self._directory / f"{key}{_SUFFIX}"
        try:
            data = path.read_bytes()
            digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            # Another process may have been killed while it wrote, or the disk is full.
            if hashlib.sha256(content).digest() != digest:
                path.unlink()
                return None
            # Its time is the order in which files are removed.
            os.utime(path)
        except OSError:
            return None
        return content

    def _write(self, directory: Path, key: str, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            # Readers see the old file or the whole new one.
            os.replace(name, directory / f"{key}{_SUFFIX}")
        except BaseException:
            os.unlink(name)
            raise

    def _evict(self, directory: Path) -> None:
        """Remove the least recently used files until the remaining files fit."""
        found = []
        for entry in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                state = entry.stat()
                found.append((state.st_mtime_ns, state.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def _is_private(directory: Path) -> bool:
    """Make the directory; True if only this user can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.stat(follow_symlinks=False)
    except OSError:
        return False
    # Another user could otherwise replace a program by one that passes.
    is_open = bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not is_open
