"""Arguments and output that several commands share: runs, settings, tables, the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError
from async_rl.monitoring.terminal import VisibleConsole, open_table

WIDTH_IF_NO_TERMINAL = 140
# A line every few seconds at the usual speed.
_PROGRESS_EVERY = 64


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


def show_progress(num_done: int, total: int, things: str) -> None:
    """Print how many are done, to stderr: the results go to stdout."""
    if num_done % _PROGRESS_EVERY == 0 or num_done == total:
        typer.echo(f"{num_done} of {total} {things}", err=True)


def show_preparation(_: float, text: str) -> None:
    """Print what the preparation of a model does now, to stderr."""
    typer.echo(text, err=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of text below their titles."""
    table = open_table(*columns)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def cell(value: object) -> str:
    """Return a value of a record as text: counts by name, numbers in their order, nothing for an
    unknown or an empty value.
    """
    match value:
        case None:
            return ""
        case float():
            return f"{value:.4g}"
        case dict():
            return "  ".join(f"{name} {cell(count)}" for name, count in value.items())
        case list():
            return " ".join(map(cell, value))
        case _:
            return str(value)
