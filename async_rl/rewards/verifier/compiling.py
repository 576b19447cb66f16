"""From source code to a program that can run: compiles it in a jail, and keeps the product in a
directory that outlives the process.

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
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from async_rl.rewards.memo import Memo
from async_rl.rewards.verifier.languages import Toolchain, source_names
from async_rl.rewards.verifier.outcomes import MIB, ChildFault, ended, printable
from async_rl.rewards.verifier.program import tried
from async_rl.sandbox.cell import Executable, Outcome, Work, command
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


Product = bytes | str
"""A compiled program, or the reason why there is none: a bounded part of the compiler's output."""


class Compiled(NamedTuple):
    """A program that is ready to run: an executable, an archive or the source itself.

    names: of `source_names`; content: the product, sealed if it runs by itself.
    """

    product: Product
    names: dict[str, str]
    content: bytes | Executable = b""


class Compiler:
    """Makes programs of one language. cells: for its compiler and its programs."""

    def __init__(self, toolchain: Toolchain, cells: Cells, binaries: Binaries) -> None:
        self.toolchain, self.cells, self._binaries = toolchain, cells, binaries
        # In memory only: the limits of a busy machine may have been the reason.
        self._memo = Memo[Product](
            size=_MAX_REMEMBERED_ERRORS, lasts=lambda product: isinstance(product, str)
        )

    async def program(self, code: str, headers: Mapping[str, str] | None = None) -> Compiled:
        """The program of this source. headers: files that it may include, by name.

        Raises InfrastructureError.
        """
        content, names = code.encode(errors="replace"), source_names(code)
        product: Product = content
        toolchain, step = self.toolchain, self.toolchain.row.compile
        if len(content) > MAX_SOURCE_BYTES:
            product = f"the program has {len(content)} bytes, more than {MAX_SOURCE_BYTES}"
        elif step is not None:
            # In the order of their names: the same headers have the same key.
            included = dict(sorted((headers or {}).items()))
            texts = [content, *(text.encode() for text in included.values())]
            spec = toolchain.command(
                step,
                names,
                profile=Profile.TOOLS,
                files=[*toolchain.fill([toolchain.row.source], names), *included],
                product=step.product,
                cpu_s=step.cpu_s,
                memory_bytes=step.memory_mb * MIB,
                process_limits=[],
                file_bytes=_FILE_BYTES,
                scratch_bytes=step.scratch_mb * MIB,
            )
            identity = (_FORM, toolchain.language, toolchain.version, spec, texts)
            key = hashlib.sha256(repr(identity).encode())
            work = command(spec, b"", texts, MESSAGE_CHARS)
            make = partial(self._make, key.hexdigest(), work, spec)
            product = await self._memo.get(key.digest(), make)
        if isinstance(product, str):
            return Compiled(product, names)
        if toolchain.row.run.program:
            return Compiled(product, names, product)
        # Sealed once for all tests of the program; in a thread, because it copies megabytes.
        return Compiled(product, names, await asyncio.to_thread(Executable, product))

    async def _make(self, key: str, work: Work, spec: CommandSpec) -> Product:
        # In threads: reading or writing megabytes would hold the event loop.
        known = await asyncio.to_thread(self._binaries.get, key)
        if known is not None:
            return known
        failure = f"the compiler of {self.toolchain.language} was stopped from outside"
        product = await tried(self.cells, work, lambda outcome: _product(outcome, spec), failure)
        if isinstance(product, bytes):
            await asyncio.to_thread(self._binaries.put, key, product)
        return product

    async def close(self) -> None:
        """Cancel the compilations that are running, and end the cells."""
        await self._memo.close()
        await self.cells.close()


def _product(outcome: Outcome, spec: CommandSpec) -> Product:
    """The product of a compiler. Raises ChildFault if the program is not known to be the reason
    for its end.
    """
    reply, (output, errors, product) = outcome
    if reply.ending == Ending.WALL:
        raise ChildFault(f"after {reply.wall_s:.0f} s")
    if len(product) > MAX_PRODUCT_BYTES:
        return f"the program is larger than {MAX_PRODUCT_BYTES // MIB} MB"
    if reply.ending == Ending.EXITED and reply.code == 0 and product:
        return product
    text = printable(errors + output, MESSAGE_CHARS)
    if reply.ending == Ending.EXITED:
        return text or f"the compiler exited with {reply.code} and made no program"
    return f"the compiler: {ended(reply, spec, text).message}"


class Binaries:
    """The cache. Without a directory, or with one that cannot be made or to which another user
    could write, it keeps the newest programs in memory only. Threads may use it.
    """

    def __init__(self, directory: Path | None, *, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory if directory and _is_private(directory) else None
        self._max_bytes = max_bytes
        self._memory: OrderedDict[str, bytes] = OrderedDict()
        self._memory_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The program, or None."""
        content = self._memory.get(key) or self._read(key)
        if content is not None:
            self._remember(key, content)
        return content

    def _remember(self, key: str, content: bytes) -> None:
        with self._lock:
            self._memory_bytes += len(content) - len(self._memory.pop(key, b""))
            self._memory[key] = content
            while self._memory_bytes > _MAX_MEMORY_BYTES and len(self._memory) > 1:
                self._memory_bytes -= len(self._memory.popitem(last=False)[1])

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

    def put(self, key: str, content: bytes) -> None:
        """Keep a program. A directory that cannot be written keeps nothing."""
        self._remember(key, content)
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=self._directory)
            try:
                with open(descriptor, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                # Readers see the old file or the whole new one.
                os.replace(name, self._directory / f"{key}{_SUFFIX}")
            except BaseException:
                os.unlink(name)
                raise
            self._evict(self._directory)

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
