"""The host's end of a command cell, and a few such cells that start when they are needed.

A command is a program of any language or a compiler; see `command_zygote.py` for what a cell
promises. Takes a command, waits for a free cell, and returns an outcome or raises CellFailed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from .cell import Cell, CellFailed, memory_file, read_file
from .command_protocol import STDERR_BYTES, CommandSpec
from .protocol import NAMESPACES, Reply

_CROWDED, _GRACE_S = 8, 60.0
_MAX_PRODUCT_BYTES = 1 << 28


class Executable(NamedTuple):
    """A program as a sealed memory file: whoever runs it cannot change it."""

    descriptor: int


class Command(NamedTuple):
    """A spec with its contents. executable: if the spec has no path; files: as named in the spec.

    output_bytes: of standard output that are returned.
    """

    spec: CommandSpec
    stdin: bytes
    files: Sequence[bytes]
    output_bytes: int
    executable: Executable | None = None


class CommandOutcome(NamedTuple):
    """The end of a command and its output. errors: standard error, with its middle left out."""

    reply: Reply
    output: bytes
    errors: bytes
    product: bytes


class CommandCell(Cell):
    """One cell. It runs one command at a time."""

    zygote: ClassVar = "command_zygote"

    async def execute(self, command: Command) -> CommandOutcome:
        """Run one command. Raises CellFailed. Cancelling ends the command."""
        spec = command.spec
        files: list[int] = []
        own: list[int] = []
        try:
            for name, content in (
                ("stdin", command.stdin),
                ("stdout", b""),
                ("stderr", b""),
                ("product", b""),
            ):
                own.append(memory_file(name, content))
            files += own
            if command.executable is not None:
                files.append(command.executable.descriptor)
            for name, content in zip(spec.files, command.files, strict=True):
                own.append(memory_file(name, content))
                files.append(own[-1])
            longest_s = _CROWDED * (spec.cpu_s + spec.sleep_s) + _GRACE_S
            reply = await self._exchange(spec.pack(), files, longest_s)
            return CommandOutcome(
                reply,
                read_file(files[1], command.output_bytes),
                read_file(files[2], 2 * STDERR_BYTES),
                read_file(files[3], _MAX_PRODUCT_BYTES),
            )
        finally:
            for descriptor in own:
                os.close(descriptor)


class CommandCells:
    """At most `num_cells` cells, started when commands come. readable: what any of them may see."""

    def __init__(self, num_cells: int, readable: Sequence[str]) -> None:
        self._free: list[CommandCell] = []
        self._slots = asyncio.Semaphore(num_cells)
        self._readable = readable
        self._is_closed = False
        self.num_replaced = 0

    async def run(self, command: Command) -> CommandOutcome:
        """Run one command in a free cell. Raises CellFailed."""
        async with self._slots:
            if self._is_closed:
                raise CellFailed("the cells are closed")
            cell = self._free.pop() if self._free else await self._start()
            try:
                return await cell.execute(command)
            finally:
                if cell.is_alive and not self._is_closed:
                    self._free.append(cell)
                else:
                    cell.kill()
                    self.num_replaced += not self._is_closed

    async def _start(self) -> CommandCell:
        return await CommandCell.start(NAMESPACES, self._readable)

    def close(self) -> None:
        """End the free cells now, and the others when their commands are cancelled."""
        self._is_closed = True
        for cell in self._free:
            cell.end()
        self._free.clear()


def executable(content: bytes) -> Executable:
    """A sealed memory file with this content. Raises OSError if the machine forbids them."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return Executable(descriptor)
