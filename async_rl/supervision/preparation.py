"""Prepares the start model in a child process, so that the supervisor never loads torch.

The child (`python -m async_rl.supervision.preparation <run_dir> <parent_pid>`) prints one JSON line
per step of progress, and a last one with the model's path or the error.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.core.errors import AsyncRLError, ConfigError, RunFailed
from async_rl.core.os import die_with_parent
from async_rl.runtime.context import load_config

_LINE_LIMIT = 2**20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the child. path: set at the end. error: set if the model cannot be prepared."""

    fraction: float
    text: str
    path: str = ""
    error: str = ""
    is_config_error: bool = False


async def prepare(run_dir: Path, on_progress: Callable[[float, str], None]) -> Path:
    """Return the directory of the start model.

    Raises ConfigError if the configured model does not exist, RunFailed if the child crashes.
    """
    output = run_dir / "logs" / "preparation.out"
    command = [sys.executable, "-m", "async_rl.supervision.preparation"]
    process = await asyncio.create_subprocess_exec(
        *command,
        run_dir,
        str(os.getpid()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=output.open("wb"),
        start_new_session=True,
        limit=_LINE_LIMIT,
    )
    assert process.stdout is not None, "stdout is a pipe"
    last = Progress(fraction=0, text="")
    try:
        async for line in process.stdout:
            last = msgspec.json.decode(line, type=Progress)
            on_progress(last.fraction, last.text)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if last.error:
        raise (ConfigError if last.is_config_error else RunFailed)(last.error)
    if code != 0 or not last.path:
        raise RunFailed(f"preparing the model exited with code {code}; see {output}")
    return Path(last.path)


def main(run_dir: Path, parent_pid: int) -> int:
    """Prepare the model of the run, in the child; return the exit code."""
    die_with_parent(parent_pid)
    from async_rl.data.prepare import prepare_model  # imports torch

    def on_progress(fraction: float, text: str) -> None:
        _print(Progress(fraction=fraction, text=text))

    try:
        path = prepare_model(load_config(run_dir), on_progress)
    except AsyncRLError as error:
        is_config_error = isinstance(error, ConfigError)
        _print(Progress(fraction=0, text="", error=str(error), is_config_error=is_config_error))
        return 1
    _print(Progress(fraction=1, text="model ready", path=str(path)))
    return 0


def _print(progress: Progress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
