"""Arguments and output that several commands share: runs, settings, tables, the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError
from async_rl.monitoring.terminal import VisibleConsole

WIDTH_IF_NO_TERMINAL = 140


RunName = Annotated[str, typer.Argument(metavar="RUN", help="name or directory of a run")]
Run = Annotated[
    str | None,
    typer.Argument(help="name or directory of a run; default: the newest"),
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="settings that differ"),
]
OutputDir = Annotated[
    Path | None,
    typer.Option("--output-dir", help="directory of the runs; default: output_dir of conf/"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="port to bind; 0 = a free one, which is printed")
]


def split_conf(settings: Sequence[str]) -> tuple[str | None, list[str]]:
    """Separate `conf=` from the other settings. Raises ConfigError if it occurs more than once."""
    confs = [word.removeprefix("conf=") for word in settings if word.startswith("conf=")]
    if len(confs) > 1:
        raise ConfigError(f"conf= is given {len(confs)} times; give it once")
    overrides = [word for word in settings if not word.startswith("conf=")]
    return (confs[0] if confs else None), overrides


def console(kind: type[VisibleConsole] = VisibleConsole) -> VisibleConsole:
    """Return standard output, wide enough for tables if it is not a terminal.

    kind: Terminal for a command whose work must not end with its output.
    """
    width = None if kind().is_terminal else WIDTH_IF_NO_TERMINAL
    # Without markup: a sampled token, a path or a list may be [/b], which rich would read as a tag.
    return kind(highlight=False, markup=False, width=width)
