"""Arguments and output that several commands share: runs, settings, tables, the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from async_rl.core.errors import ConfigError
from async_rl.monitoring.terminal import VisibleConsole
from async_rl.runs.directory import all_runs, default_output_dir

WIDTH_IF_NO_TERMINAL = 140


def complete_run(incomplete: str) -> list[str]:
    """Return the runs whose name starts like this, the newest first."""
    # A completion reads names of directories only, since it must answer immediately.
    names = (path.name for path in all_runs(default_output_dir()))
    return [name for name in names if name.startswith(incomplete)]


def complete_setting(incomplete: str) -> list[str]:
    """Return `conf=NAME`, settings and their values that start like this."""
    from async_rl.composition.choices import CONF_DIR
    from async_rl.composition.files import names
    from async_rl.composition.schema import find, settings

    before = _before_the_break()
    typed = before + ("" if incomplete in ("=", ":") else incomplete)
    path = typed.partition("=")[0]
    setting = find(path)
    values = sorted(file.stem for file in CONF_DIR.glob(f"{path}/*.yaml"))
    if path == "conf":
        values = names()
    elif setting is not None:
        is_bool = setting.spec.get("type") == "boolean"
        values = ["true", "false"] if is_bool else [str(value) for value in setting.choices]
    words = [f"{path}={value}" for value in values]
    if "=" not in typed:
        # Names of settings only until `=` is typed; their values after it.
        words += ["conf=", *(f"{name}=" for name in settings())]
    matches = [word.removeprefix(before) for word in words if word.startswith(typed)]
    if len(matches) == 1 and matches[0].endswith("=") and "COMP_WORDS" in os.environ:
        matches.append(f"{matches[0]}...")  # after a single match bash adds a space
    return matches


def _before_the_break() -> str:
    """Return what stands before the part of a word that bash completes, such as `conf=`.

    Bash splits words at = and : too (COMP_WORDBREAKS), and replaces only the last part. Other
    shells do not set COMP_WORDS.
    """
    words = os.environ.get("COMP_WORDS", "").split("\n")
    last = min(int(os.environ.get("COMP_CWORD", "0")), len(words) - 1)
    start = last
    while start > 0 and (words[start] in ("=", ":") or words[start - 1] in ("=", ":")):
        start -= 1
    return "".join(words[start : last + (words[last] in ("=", ":"))])


RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="name or directory of a run", autocompletion=complete_run),
]
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
    typer.Option("--output-dir", help="directory of the runs; default: output_dir of conf/"),
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


def open_table(*titles: str) -> Table:
    """Return a table without lines, with a bold header."""
    return Table(*titles, box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
