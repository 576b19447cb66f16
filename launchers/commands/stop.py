"""`async-rl stop`: stops a run and waits until it has exited."""

from typing import Annotated

import typer

from async_rl.launchers.api.run import ended, open_run
from async_rl.launchers.commands.options import OutputDir, Run
from async_rl.runs.control import living_pid
from async_rl.runs.directory import find_run


def stop(
    run: Run = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not finish the step in progress; it is lost")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Finish the step, save and stop a run; return when it has exited.

    Examples: async-rl stop; async-rl stop my-run --now
    """
    opened = open_run(find_run(run, output_dir))
    # Printed before the wait, which lasts for a step.
    if living_pid(opened.directory) is not None:
        how = "ending" if now else "stopping: it finishes its step and saves"
        typer.echo(f"run {opened.name} is {how}")
    typer.echo(ended(opened.stop(now=now)))
