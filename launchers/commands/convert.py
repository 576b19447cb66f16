"""`async-rl convert`: a checkpoint of an earlier version gets the present format.

Invariants: it is read in the jail and nowhere else, by a program that can read the directory and
write one file; its result is checked as a file of a stranger; the earlier checkpoint is kept.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.checksums import complete, damage, sums_of
from async_rl.core.errors import ConfigError, DataError, InfrastructureError
from async_rl.core.os import sync
from async_rl.learner.checkpoint_index import (
    INDEX_FILE,
    file_of,
    old_format,
    open_shard,
    parse_index,
)
from async_rl.sandbox.cell import Cell, CellFailed, Command, CommandOutcome
from async_rl.sandbox.cells import interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM, shown
from async_rl.sandbox.protocol import COMMANDS, NAMESPACES, CommandSpec, Profile
from async_rl.training.checkpoints import set_aside

_PROGRAM = "torch_checkpoint.py"
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_SPARE_BYTES = 1 << 29
# CPU time. Reading and copying a terabyte takes 20 minutes.
_LIMIT_S = 3600.0


def convert(
    directory: Annotated[Path, typer.Argument(help="such as RUN/checkpoints/step_000020")],
) -> None:
    """Convert a checkpoint of an earlier version, which can run code when it is read, in a jail.

    Examples: async-rl convert runs/my-run/checkpoints/step_000020
    """
    if not old_format(directory):
        raise ConfigError(f"{directory} is no checkpoint of an earlier version")
    if reason := damage(directory):
        raise DataError(f"{directory} is damaged: {reason}; convert another checkpoint")
    try:
        kept = _convert(Path(os.path.realpath(directory)))
    except (CellFailed, OSError) as error:
        raise InfrastructureError(f"{directory} cannot be converted: {error}") from error
    typer.echo(f"{directory} is converted; the earlier files are in {kept}")


def _convert(directory: Path) -> Path:
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tensors = partial / file_of(0)
    with tensors.open("x+b") as output:
        done = asyncio.run(_read_in_jail(str(directory), output.fileno()))
    try:
        index = (open_shard(tensors).metadata() or {}).get("index", "").encode()
    except DataError as error:
        raise DataError(
            f"{directory} is no checkpoint of an earlier version: {done.errors.decode()[-200:]}"
        ) from error
    parse_index(index, directory)
    (partial / INDEX_FILE).write_bytes(index)
    converted = directory.with_name(directory.name + ".converted")
    complete(partial, converted, sums_of(partial))
    # Both are complete and on the disk at any time.
    kept = set_aside(directory)
    converted.rename(directory)
    sync(directory.parent)
    return kept


async def _read_in_jail(directory: str, output: int) -> CommandOutcome:
    """Write the tensors into the output. Raises CellFailed or OSError."""
    size_bytes = sum(path.stat().st_size for path in os.scandir(directory))
    python = os.path.realpath(sys.executable)  # noqa: ASYNC240  nothing else runs
    spec = CommandSpec(
        profile=Profile.PROGRAM,
        executable=python,
        arguments=[python, "-I", "-S", "-B", _PROGRAM, shown(directory)],
        environment={},
        files=[_PROGRAM],
        product="",
        readable=[*interpreter_paths(), *SYSTEM, shown(directory)],
        runnable=[python, os.path.realpath(_LOADER)],  # noqa: ASYNC240
        cpu_s=_LIMIT_S,
        # One tensor at a time: in its file, on its own, joined.
        memory_bytes=3 * size_bytes + _SPARE_BYTES,
        process_limits=[],
        file_bytes=size_bytes + _SPARE_BYTES,
        scratch_bytes=_SPARE_BYTES,
    )
    program = files("async_rl.sandbox").joinpath(_PROGRAM).read_bytes()
    cell = await Cell.start(NAMESPACES, [*interpreter_paths(), directory], kind=COMMANDS)
    try:
        return await cell.run(Command(spec, b"", [program], 0, output=output))
    finally:
        cell.kill()
