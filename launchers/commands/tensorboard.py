"""`async-rl tensorboard`: TensorBoard for finished runs, or for several runs together."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.extras import require
from async_rl.launchers.commands.options import OutputDir
from async_rl.runs.directory import all_runs, default_output_dir, find_run, is_directory_of_runs


def tensorboard(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN ...|DIR]",
            help="names or directories of runs, or a directory of runs; default: all runs",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port to bind; 0 = a free one, which is printed")
    ] = 0,
    host: Annotated[
        str, typer.Option(help="address to bind; other machines reach any but loopback")
    ] = "127.0.0.1",
    output_dir: OutputDir = None,
) -> None:
    """Serve TensorBoard with live and finished runs under their names, until Ctrl-C.

    Examples: async-rl tensorboard; async-rl tensorboard my-run other-run; async-rl tensorboard
    /data/runs
    """
    run_dirs = _run_dirs(chosen or [], output_dir)
    require("tensorboard", "async-rl tensorboard")
    from async_rl.monitoring.tensorboard_process import TensorBoard

    # As Ctrl-C: its folder and TensorBoard's own children must not stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.NamedTemporaryFile(prefix="async-rl-tensorboard-") as log:
        board = TensorBoard(run_dirs, host=host, port=port, log=Path(log.name))
        try:
            typer.echo(f"TensorBoard of {board.title} at {board.url}")
            typer.echo("Ctrl-C ends it")
            code = board.wait()
            lines = Path(log.name).read_text(errors="replace").splitlines()
            reason = lines[-1] if lines else f"exit status {code}"
            raise InfrastructureError(f"TensorBoard has ended: {reason}")
        except KeyboardInterrupt:
            pass
        finally:
            board.close()


def _run_dirs(chosen: list[str], output_dir: Path | None) -> list[Path]:
    """Return the directories of the chosen runs, by default all. Raises ConfigError if there is
    none, or if two of the same name were chosen.
    """
    if not chosen:
        run_dirs = all_runs(output_dir or default_output_dir())
    # A directory of runs may have the name of no run.
    elif len(chosen) == 1 and is_directory_of_runs(Path(chosen[0])):
        run_dirs = all_runs(Path(chosen[0]).expanduser())
    else:
        run_dirs = [find_run(name, output_dir) for name in chosen]
    if not run_dirs:
        raise ConfigError(f"{output_dir or default_output_dir()} has no run")
    names = [run_dir.name for run_dir in run_dirs]
    # TensorBoard distinguishes runs by their names.
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is the name of {names.count(name)} chosen runs; choose one")
    return run_dirs
