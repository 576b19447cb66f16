"""What commands about runs share: how a person names a run, and the terminal they answer on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

WIDTH_IF_NO_TERMINAL = 140

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="name or directory of a run; default: the newest")]
OutputDir = Annotated[Path | None, typer.Option("--output-dir", help="where runs are kept; default: output_dir of conf/")]


def default_output_dir() -> Path:
    """The output_dir of conf/."""
    from async_rl.launchers.compose import compose, names

    return Path(compose(names()[0]).output_dir)


def console() -> Console:
    """Standard output, wide enough for tables where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH_IF_NO_TERMINAL)
