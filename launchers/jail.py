"""One command in a jail of its own: what a person's file asks for, which nobody has checked."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from async_rl.core.errors import DataError
from async_rl.sandbox.cell import Cell, Outcome, Work, command
from async_rl.sandbox.cells import interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM
from async_rl.sandbox.protocol import COMMANDS, NAMESPACES, CommandSpec, Ending, Profile

_LOADER = "/lib64/ld-linux-x86-64.so.2"


def run_in_jail(
    arguments: Sequence[str],
    files: Mapping[str, bytes],
    *,
    cpu_s: float,
    memory_bytes: int,
    product: str = "",
    environment: Mapping[str, str] | None = None,
) -> list[bytes]:
    """Run a command in an empty directory with these files, and return its standard output, its
    standard error and the product. Raises CellFailed or OSError, and DataError for a command that
    was ended for its time.

    product: name of a file of that directory to return.
    """
    executable = os.path.realpath(arguments[0])
    spec = CommandSpec(
        profile=Profile.TOOLS,
        executable=executable,
        arguments=[executable, *arguments[1:]],
        environment=dict(environment or {}),
        files=list(files),
        product=product,
        readable=[*interpreter_paths(), *SYSTEM],
        runnable=[executable, os.path.realpath(_LOADER), *SYSTEM],
        cpu_s=cpu_s,
        memory_bytes=memory_bytes,
        process_limits=[],
        file_bytes=memory_bytes,
        scratch_bytes=sum(map(len, files.values())) + (1 << 24),
    )
    ran = asyncio.run(_run(command(spec, b"", list(files.values()), memory_bytes)))
    if ran.reply.ending in (Ending.CPU, Ending.WALL):
        raise DataError(f"it was ended after {ran.reply.wall_s:.0f} s, without an end of its own")
    return ran.contents


async def _run(work: Work) -> Outcome:
    cell = await Cell.start(NAMESPACES, interpreter_paths(), kind=COMMANDS)
    try:
        return await cell.run(work)
    finally:
        cell.kill()
