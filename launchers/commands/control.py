"""The commands that change a live run: `async-rl stop` and `async-rl scale`.

Invariants: stop returns when the run has exited; scale returns immediately, and `status` shows the
progress. A wrong name or number of a pool is reported with its remedy and changes nothing.
"""

import re
from typing import Annotated

import typer

from async_rl.config.checks.run import raise_if_any
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


def scale(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] POOL=COUNT ...",
            help=(
                "a run (default: the newest), then generators=N, verifiers=N, gateways=N, or a pool"
                " as status shows it"
            ),
        ),
    ],
    output_dir: OutputDir = None,
) -> None:
    """Change how many generators, verifiers or gateways (of agents) a live run has.

    Examples: async-rl scale generators=4; async-rl scale my-run generators=2 verifiers=2; async-rl
    scale generators.big=3 generators.small=1
    """
    # A pool is given with its count; the first word without one names a run.
    run = None if "=" in words[0] else words[0]
    wanted = counts(words[1:] if run else words)
    opened = open_run(find_run(run, output_dir))
    for pool in opened.scale(**wanted):
        state = f"live {pool.live}, starting {pool.starting}, draining {pool.draining}"
        typer.echo(f"{pool.pool}: wanted {pool.wanted}; now {state}")


def counts(words: list[str]) -> dict[str, int]:
    """Parse `POOL=COUNT` words. Raises ConfigError with a line per wrong one."""
    raise_if_any(
        f"{word}: is not of the form POOL=COUNT, as in generators=4"
        for word in words
        if not re.fullmatch(r"[^=]+=\d+", word)
    )
    return {pool: int(count) for pool, _, count in (word.rpartition("=") for word in words)}
