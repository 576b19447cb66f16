"""What commands about runs share: how a person names a run, and the terminal they answer on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

WIDTH_IF_NO_TERMINAL = 140


def complete_run(incomplete: str) -> list[str]:
    """Names of runs that begin so, the newest first."""
    from async_rl.launchers.commands.runs import all_runs

    return [
        path.name for path in all_runs(default_output_dir()) if path.name.startswith(incomplete)
    ]


def complete_setting(incomplete: str) -> list[str]:
    """`conf=` with each name of conf/, and each setting, that begin so."""
    from async_rl.launchers.configuration.compose import names
    from async_rl.launchers.configuration.schema import settings

    offered = [f"conf={name}" for name in names()] + [f"{path}=" for path in settings()]
    return [word for word in offered if word.startswith(incomplete)]


Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="name or directory of a run; default: the newest",
        autocompletion=complete_run,
    ),
]
OutputDir = Annotated[
    Path | None,
    typer.Option("--output-dir", help="where runs are kept; default: output_dir of conf/"),
]


def default_output_dir() -> Path:
    """The output_dir of conf/."""
    from async_rl.launchers.configuration.compose import compose, names

    return Path(compose(names()[0]).output_dir)


def console() -> Console:
    """Standard output, wide enough for tables where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH_IF_NO_TERMINAL)
