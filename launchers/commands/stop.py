"""`async-rl stop`: ends a run and waits until it has ended."""

from __future__ import annotations

from typing import Annotated

import typer

from async_rl.launchers.commands import runs
from async_rl.launchers.commands.control import ask_stop, living_pid, wait_for_run
from async_rl.launchers.commands.options import OutputDir, Run, default_output_dir
from async_rl.launchers.commands.status import ended

_GRACE_S = 60.0
"""Added to the run's own stop timeout for the last evaluation and the end of the processes."""


def stop(
    run: Run = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not finish the step in progress; it is lost")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Finish the step, save and end a run; return when it has ended.

    Examples: async-rl stop; async-rl stop my-run --now
    """
    run_dir = runs.find(run, output_dir or default_output_dir())
    name = run_dir.name
    pid = living_pid(run_dir)
    if pid is not None:
        ask_stop(run_dir, pid, is_graceful=not now)
        if now:
            typer.echo(f"run {name} is ending")
        else:
            typer.echo(f"run {name} is stopping: it finishes its step and saves")
        timeout_s = runs.config_of(run_dir).timeouts.stop_s + _GRACE_S
        if not wait_for_run(run_dir, pid, timeout_s=timeout_s):
            problem = f"run {name} (pid {pid}) has not ended after {timeout_s:.0f} s"
            typer.echo(f"error: {problem}; end it with async-rl stop {name} --now", err=True)
            raise typer.Exit(1)
    typer.echo(ended(runs.remains(run_dir)))
