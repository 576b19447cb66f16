"""Prepares the start model and the prompts in a child process, so that the supervisor never loads
torch and neither the supervisor nor the buffer has the readers of data files.

The child (`python -m async_rl.supervision.preparation <run_dir> <parent_pid>`) prints one JSON line
per step of progress, and a last one with the model's path or the error.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from async_rl.core.errors import RunFailed
from async_rl.core.os import die_with_parent
from async_rl.observability.logs import configure_logging
from async_rl.runtime.context import load_config
from async_rl.runtime.main import describe

_LINE_LIMIT = 2**20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the child. path: of the model, in the last one. error: set if the model or the
    prompts cannot be prepared.
    """

    fraction: float = 0.0
    text: str = ""
    path: str = ""
    error: str = ""


async def prepare(run_dir: Path, on_progress: Callable[[float, str], None]) -> Path:
    """Prepare the start model and the prompts; return the directory of the model.

    Raises RunFailed if the configured model does not exist, the data cannot be used or the child
    crashes.
    """
    output = run_dir / "logs" / "preparation.out"
    command = [sys.executable, "-m", "async_rl.supervision.preparation"]
    with output.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            run_dir,
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            # Ctrl-C reaches the supervisor only, which decides what ends.
            start_new_session=True,
            limit=_LINE_LIMIT,
        )
    assert process.stdout is not None, "stdout is a pipe"
    last = Progress()
    try:
        async for line in process.stdout:
            last = msgspec.json.decode(line, type=Progress)
            if not last.error:
                on_progress(last.fraction, last.text)
        code = await process.wait()
    finally:
        if process.returncode is None:
            # Also on a stop: no child outlives the supervisor.
            process.kill()
            await process.wait()
    if last.error:
        raise RunFailed(last.error)
    if code != 0 or not last.path:
        raise RunFailed(f"preparing the run exited with code {code}; see {output}")
    return Path(last.path)


def main(run_dir: Path, parent_pid: int) -> int:
    """Prepare the model and the prompts of the run, in the child; return the exit code."""
    die_with_parent(parent_pid)
    log = configure_logging(run_dir, "preparation")
    from async_rl.data.model_files import prepare_model  # imports torch
    from async_rl.data.prompt_file import PROMPTS_FILE
    from async_rl.data.prompts import prepare_prompts

    def show(fraction: float, text: str) -> None:
        _print(Progress(fraction=fraction, text=text))

    def on_rows(num_done: int, num_rows: int) -> None:
        show(num_done / max(num_rows, 1), f"{num_done} of {num_rows} prompts")

    try:
        config = load_config(run_dir)
        model = prepare_model(config, show)
        prepare_prompts(run_dir / PROMPTS_FILE, config, model, on_rows)
    except Exception as error:  # the process boundary: the supervisor reports the cause
        log.error("fatal", exc_info=error)
        _print(Progress(error=describe(error)))
        return 1
    _print(Progress(fraction=1, text="model ready", path=str(model)))
    return 0


def _print(progress: Progress) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
