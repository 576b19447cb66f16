"""Makes or finds the start model in a process of its own, so that the supervisor never loads torch.

The child (`python -m async_rl.supervision.preparation <run_dir>`) prints one JSON line per bit of
progress and a last one with the model's path or with the error; the supervisor draws the bar.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.core.errors import AsyncRLError, ConfigError, RunFailed
from async_rl.core.os import die_with_parent

_LINE_LIMIT = 2**20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the child: how far, doing what; path at the end; error if it cannot be done."""

    fraction: float
    text: str
    path: str = ""
    error: str = ""
    is_config_error: bool = False


async def prepare(run_dir: Path, on_progress: Callable[[float, str], None]) -> Path:
    """The directory of the start model. Raises ConfigError if the configuration asks for one that
    is not there, RunFailed on a crash.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "async_rl.supervision.preparation",
        str(run_dir),
        str(os.getpid()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=(run_dir / "logs" / "preparation.out").open("wb"),
        start_new_session=True,
        limit=_LINE_LIMIT,
    )
    assert process.stdout is not None
    last = Progress(fraction=0, text="")
    try:
        async for line in process.stdout:
            last = msgspec.json.decode(line, type=Progress)
            on_progress(last.fraction, last.text)
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
    if last.error:
        raise (ConfigError if last.is_config_error else RunFailed)(last.error)
    if code != 0 or not last.path:
        raise RunFailed(
            f"preparing the model ended with exit code {code}; see {run_dir}/logs/preparation.out"
        )
    return Path(last.path)


def _emit(progress: Progress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    """The child: prepares the model of the run directory given as the first argument."""
    from async_rl.runtime.context import load_config

    die_with_parent(int(sys.argv[2]))
    from async_rl.data.prepare import prepare_model  # heavy: imports torch

    config = load_config(Path(sys.argv[1]))
    try:
        path = prepare_model(
            config, lambda fraction, text: _emit(Progress(fraction=fraction, text=text))
        )
    except AsyncRLError as error:
        _emit(
            Progress(
                fraction=0,
                text="",
                error=str(error),
                is_config_error=isinstance(error, ConfigError),
            )
        )
        return 1
    _emit(Progress(fraction=1, text="model ready", path=str(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
