"""Record the trainers of a person's script, which runs in the jail with recorders in their place.

Invariants: nothing of the script runs outside the jail, which has neither the person's files nor a
network; of the files next to the script only scripts and modules are copied into it.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from async_rl.core.errors import ConfigError
from async_rl.sandbox.cell import Cell, CellFailed, Outcome, Work, command, interpreter_paths
from async_rl.sandbox.namespaces import SYSTEM
from async_rl.sandbox.protocol import COMMANDS, NAMESPACES, CommandSpec, Ending, Profile

CPU_S = 10.0
_LOADER = "/lib64/ld-linux-x86-64.so.2"
_BYTES = 1 << 28
# A message carries at most 253 descriptors.
_MAX_FILES = 60
_SCRIPTS = (".sh", ".bash", ".py")
_LONGEST_FILE_BYTES = 1 << 20


class Script(msgspec.Struct, frozen=True):
    """trainers: keyword arguments of each trainer that a Python script made; notes: unknown values
    that decided a branch, and the error that ended the script.
    """

    trainers: list[dict[str, Any]]
    notes: list[str]


def of_shell(file: Path, words: Sequence[str]) -> list[list[str]]:
    """Return the words of every command by which a shell script starts a trainer's program."""
    _, errors, recorded = _run(file, "recorder.sh", ["/usr/bin/bash", file.name, *words])
    commands = recorded.decode(errors="replace").split("\0\1\0")[:-1]
    if not commands:
        raise ConfigError(f"{file}: bash starts no trainer from it ({_said(errors)})")
    return [command.split("\0") for command in commands]


def of_python(file: Path, words: Sequence[str]) -> Script:
    """Return what a Python script gives to its trainers."""
    arguments = [sys.executable, "-s", "-S", "-B", "recorder.py", file.name, *words]
    output, errors, _ = _run(file, "recorder.py", arguments)
    try:
        return msgspec.json.decode(output, type=Script)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: it ends before it makes a trainer ({_said(errors)})") from error


def _said(errors: bytes) -> str:
    return errors.decode(errors="replace").strip()[-200:] or "without a message"


def _run(file: Path, recorder: str, arguments: list[str]) -> list[bytes]:
    """Run a command next to the script, its neighbours and the recorder."""
    near = [
        path
        for path in sorted(file.parent.iterdir())
        if path.suffix in _SCRIPTS and path.is_file() and path != file
    ]
    texts = {
        path.name: path.read_bytes()
        for path in [*near[:_MAX_FILES], file]
        if path.stat().st_size <= _LONGEST_FILE_BYTES
    }
    if file.name not in texts:
        raise ConfigError(f"{file}: no script has more than {_LONGEST_FILE_BYTES >> 20} MB")
    texts[recorder] = resources.files(__package__).joinpath(recorder).read_bytes()
    executable = os.path.realpath(arguments[0])
    spec = CommandSpec(
        profile=Profile.TOOLS,
        executable=executable,
        arguments=[executable, *arguments[1:]],
        environment=[
            f"HOME={os.path.expanduser('~')}",
            f"BASH_ENV={recorder}",
            f"ASYNC_RL_DIRECTORY={os.getcwd()}",
        ],
        files=list(texts),
        product="recorded",
        readable=[*interpreter_paths(), *SYSTEM],
        runnable=[executable, os.path.realpath(_LOADER), *SYSTEM],
        cpu_s=CPU_S,
        memory_bytes=_BYTES,
        process_limits=[],
        file_bytes=_BYTES,
        scratch_bytes=sum(map(len, texts.values())) + (1 << 24),
    )
    try:
        ran = asyncio.run(_in_cell(command(spec, b"", list(texts.values()), _BYTES)))
    except (CellFailed, OSError) as error:
        raise ConfigError(
            f"{file}: the jail that runs scripts does not work: {error}; allow user namespaces"
            " (async-rl doctor), or migrate the yaml or JSON file that the script reads"
        ) from error
    if ran.reply.ending in (Ending.CPU, Ending.WALL):
        raise ConfigError(
            f"{file}: it was ended after {ran.reply.wall_s:.0f} s, without an end of its own"
        )
    return ran.contents


async def _in_cell(work: Work) -> Outcome:
    cell = await Cell.start(NAMESPACES, (), kind=COMMANDS)
    try:
        return await cell.run(work)
    finally:
        cell.kill()
