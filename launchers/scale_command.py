"""`async-rl scale`: other numbers of generators and verifiers for a run that is going.

Invariants: a number that cannot be is refused before the run hears of it; what the run says no to is told in its words.
"""

from __future__ import annotations

from typing import Annotated

import typer

from async_rl.errors import ConfigError
from async_rl.launchers import runs
from async_rl.launchers.control import ask_scale, ask_status
from async_rl.launchers.options import OutputDir, complete_run, default_output_dir
from async_rl.launchers.preflight import check_room
from async_rl.machine import this_machine
from async_rl.topology import scaled


def scale(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] POOL=COUNT ...",
            help="a run, by default the newest, and how many processes of each pool are wanted",
            autocompletion=complete_run,
        ),
    ],
    output_dir: OutputDir = None,
) -> None:
    """Change how many generators and verifiers a live run has; the learner goes on meanwhile.

    Examples: async-rl scale generators=4; async-rl scale my-run generators=1 verifiers=2
    """
    from async_rl.processes.scaling import check_counts  # sockets: not for --help

    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"{names[1]}: give one run and settings like generators=4; {names[0]} is taken as the run")
    counts = dict(map(_count, (word for word in words if "=" in word)))
    if not counts:
        raise ConfigError("nothing to change: say for example generators=4 or verifiers=2")
    run_dir = runs.find(names[0] if names else None, output_dir or default_output_dir())
    before = ask_status(run_dir)
    if before is None:
        raise ConfigError(f"run {run_dir.name} does not answer: only a live run can be scaled; async-rl resume goes on with one that ended")
    config, machine = runs.config_of(run_dir), this_machine()
    wanted = {name: pool.wanted for name, pool in before.pools.items()} | counts
    check_counts(config, wanted, machine)
    check_room(scaled(config, wanted), machine)
    ask_scale(run_dir, counts)
    for name, count in counts.items():
        typer.echo(f"{name}: {before.pools[name].wanted} -> {count}")
    typer.echo(f"run {run_dir.name} changes as they start and leave: async-rl status {run_dir.name} --watch")


def _count(word: str) -> tuple[str, int]:
    name, _, value = word.partition("=")
    if not value.isdecimal():
        raise ConfigError(f"{word}: give a whole number of processes, for example {name or 'generators'}=2")
    return name, int(value)
