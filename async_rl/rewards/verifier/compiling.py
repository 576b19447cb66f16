"""From source code to a program that can run: compiles it in a jail, and remembers the product.

Invariants: sources that arrive at the same time and are equal are compiled once; a compile error
counts against the program, a compiler that was stopped from outside does not and is tried again. A
key names the sources and the command, so a program only gets the product compiled from its source.
Products are in memory only: no file can be changed between a compilation and a run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from async_rl.rewards.memo import Memo
from async_rl.rewards.verifier.languages import Toolchain, source_names
from async_rl.rewards.verifier.outcomes import MIB, ChildFault, ended, printable
from async_rl.rewards.verifier.program import tried
from async_rl.sandbox.cell import Executable, Outcome, command
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import CommandSpec, Ending, Profile

# Contests allow 64 KB.
MAX_SOURCE_BYTES = 1 << 20
# A static program of C++ or Go has about 2 MB, and each is copied into memory for a run.
MAX_PRODUCT_BYTES = 64 << 20
MESSAGE_CHARS = 2000
_FILE_BYTES = 128 << 20
# The groups that are judged at the same time: equal programs come from one group. A static program
# of a policy has 2 MB; a larger product is made again, so that no source decides how much memory
# the verifier takes.
_REMEMBERED, _MAX_REMEMBERED_BYTES = 64, 4 << 20


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

    def __init__(self, toolchain: Toolchain, cells: Cells) -> None:
        self.toolchain, self.cells = toolchain, cells
        self._memo = Memo[Product](
            size=_REMEMBERED, lasts=lambda product: len(product) <= _MAX_REMEMBERED_BYTES
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
            key = hashlib.sha256(repr((spec, texts)).encode()).digest()
            make = partial(
                tried,
                self.cells,
                command(spec, b"", texts, MESSAGE_CHARS),
                lambda outcome: _product(outcome, spec),
                f"the compiler of {toolchain.language} was stopped from outside",
            )
            product = await self._memo.get(key, make)
        if isinstance(product, str):
            return Compiled(product, names)
        if toolchain.row.run.program:
            return Compiled(product, names, product)
        # Sealed once for all tests of the program; in a thread, because it copies megabytes.
        return Compiled(product, names, await asyncio.to_thread(Executable, product))

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
