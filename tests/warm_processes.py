"""Processes of tests, forked from a server that has imported torch, the learner and the commands.

Importing them takes two to eight seconds of processor time, the learner's modules included.
"""

import faulthandler
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from async_rl.core.os import leave

# By their full names: the server of Python 3.11 does not know the path of the tests, and ignores a
# module of theirs without a word. One list for all tests, because a worker of the suite has one
# server, which the first process starts.
_IMPORTS = [
    "async_rl.weights.routes",
    "async_rl.learner.trainer",
    "async_rl.launchers.cli",
    *(f"async_rl.launchers.commands.{name}" for name in ("launch", "live", "stored")),
]


class WarmProcess(ForkServerProcess):
    """A process that ends as those of the product do: with its process groups."""

    def run(self) -> None:
        """Run the target and exit."""
        # Into the output of the test: an exit code alone does not say where native code crashed.
        faulthandler.enable()
        # multiprocessing prints an error, and exits with it as directly.
        super().run()
        leave(0)


class _WarmContext(ForkServerContext):
    Process = WarmProcess


def warm_context() -> ForkServerContext:
    """Return a context of multiprocessing whose processes have torch and the learner's modules."""
    context = _WarmContext()
    context.set_forkserver_preload(_IMPORTS)
    return context


def run_command(
    words: Sequence[str | Path], *, folder: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `async-rl` with these words in a process of its own, as subprocess.run would; it is
    forked, so it has imported what it needs.
    """
    arguments = [str(word) for word in words]
    with tempfile.TemporaryDirectory(prefix="command-") as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        child = warm_context().Process(
            target=_command, args=(arguments, out, err, folder or Path.cwd(), dict(os.environ))
        )
        child.start()
        child.join(timeout_s)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(["async-rl", *arguments], timeout_s)
        return subprocess.CompletedProcess(
            ["async-rl", *arguments], child.exitcode, out.read_text(), err.read_text()
        )


def _command(arguments: list[str], out: Path, err: Path, folder: Path, env: dict[str, str]) -> None:
    for path, number in ((out, 1), (err, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    # The server may be older than the variables and the directory of the test.
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["async-rl", *arguments]
    from async_rl.launchers.main import main

    main()
