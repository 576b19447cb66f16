"""`async-rl scale`: changes the number of generators, verifiers and gateways of a live run.

Invariants: a wrong name or number is reported with its remedy and changes nothing; the command
returns immediately, and `status` shows the progress.
"""

from __future__ import annotations

from typing import Annotated

import typer

from async_rl.config.pool_sizes import role_of
from async_rl.core.errors import ConfigError
from async_rl.core.machine import this_machine
from async_rl.launchers.api.run import open_run
from async_rl.launchers.commands.options import OutputDir
from async_rl.runs.directory import find_run
from async_rl.runs.status import config_of


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
    is_forced: Annotated[
        bool, typer.Option("--force", help="even if this machine may have too little memory")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Change how many generators, verifiers or gateways (of agents) a live run has.

    Examples: async-rl scale generators=4; async-rl scale my-run generators=2 verifiers=2; async-rl
    scale generators.big=3 generators.small=1
    """
    # A pool is given with its count; the first word without one names a run.
    run = None if "=" in words[0] else words[0]
    wanted = counts(words[1:] if run else words)
    run_dir = find_run(run, output_dir)
    pools = open_run(run_dir).scale(is_forced=is_forced, **wanted)
    for pool in pools:
        state = f"live {pool.live}, starting {pool.starting}, draining {pool.draining}"
        typer.echo(f"{pool.pool}: wanted {pool.wanted}; now {state}")

    config = config_of(run_dir).generators
    number = sum(pool.wanted for pool in pools if role_of(pool.pool) == "generator")
    cores = len(config.cores or this_machine().cores)
    # A warning only: more generators than cores are slow but correct.
    if config_of(run_dir).launcher.is_one_machine and not config.gpus_each and number > cores:
        have = f"{cores} core{'s' * (cores > 1)}"
        typer.echo(
            f"warning: {number} generators share {have}, so each becomes slower; more than"
            f" {cores} rarely help",
            err=True,
        )


def counts(words: list[str]) -> dict[str, int]:
    """Parse `POOL=COUNT` words. Raises ConfigError with a line per wrong one."""
    problems: list[str] = []
    wanted: dict[str, int] = {}
    for word in words:
        pool, equals, number = word.partition("=")
        if not equals or not pool:
            problems.append(f"{word}: is not of the form POOL=COUNT, as in generators=4")
        elif not number.isdecimal():
            problem = f"{number or 'nothing'} is not a number of processes"
            problems.append(f"{word}: {problem}; write {pool}=4")
        elif pool in wanted:
            problems.append(f"{word}: {pool} is given twice; give it once")
        else:
            wanted[pool] = int(number)
    if not words:
        problems.append("no count is given; write for example async-rl scale generators=4")
    if problems:
        raise ConfigError("\n".join(problems))
    return wanted
