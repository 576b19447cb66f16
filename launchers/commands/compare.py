"""`async-rl compare`: where two runs part, and how settings, results and times differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from async_rl.buffer.store.batches import recorded_batches
from async_rl.composition import schema
from async_rl.composition.changes import changes
from async_rl.core.errors import AsyncRLError, InfrastructureError
from async_rl.core.extras import require
from async_rl.launchers.commands.options import OutputDir, complete_run, console, open_table
from async_rl.launchers.commands.pages import refuse_existing, rendered
from async_rl.observability.catalogue import FIRST_SCREEN
from async_rl.runs.config import config_of
from async_rl.runs.directory import find_run
from async_rl.runs.divergence import Found, RecordedRun, first_difference
from async_rl.runs.metrics import RowReader
from async_rl.runs.samples import Decode, decoder

_TIMES = "time/", "stage_s/", "wait_s/", "blocked_s/"
_LEAST_S = 0.001  # of a stage that is listed
_NOT_OBJECTIVE = ("run_name", "output_dir")

_Name = Annotated[
    str,
    typer.Argument(metavar="RUN", help="name or directory of a run", autocompletion=complete_run),
]
Rows = Mapping[int, Mapping[str, float]]


def compare(
    one: _Name,
    other: _Name,
    html: Annotated[
        Path | None, typer.Option(help="also write a page with the curves of both to this file")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Find the first step and input in which two runs differ; compare settings, results, times.

    Examples: async-rl compare run-1 run-2; async-rl compare run-1 run-2 --html pair.html
    """
    directories = find_run(one, output_dir), find_run(other, output_dir)
    refuse_existing(html)
    rows = tuple({int(row["step"]): row for row in RowReader(path).new()} for path in directories)
    terminal = console()
    settings = differing_settings(*directories)
    try:
        found = where_they_part(directories, (rows[0], rows[1]))
        lines = list(sentences(directories, found))
    except InfrastructureError as error:
        lines = [f"the steps cannot be compared: {error}"]
    for line in lines:
        terminal.print(line, soft_wrap=True)
    results, times = result_table(rows[0], rows[1]), time_table(rows[0], rows[1])
    for title, table in (("settings", settings), ("results", results), ("seconds per step", times)):
        terminal.print(f"\n{title}", style="bold")
        terminal.print(_table(directories, table) if table else "no difference")
    if html is not None:
        write_page(html, directories, lines, {"results": results, "seconds per step": times})
        terminal.print(f"\nthe page is in {html}", soft_wrap=True)


def where_they_part(directories: tuple[Path, Path], rows: tuple[Rows, Rows]) -> Found:
    """Compare the recorded steps of two runs."""
    steps = sorted(step for step in rows[0].keys() & rows[1].keys() if step > 0)
    with contextlib.ExitStack() as stack:
        sides = [
            RecordedRun(
                run_dir=path,
                batches=stack.enter_context(recorded_batches(path)),
                metrics=metrics,
                decode=_decoder(path),
            )
            for path, metrics in zip(directories, rows, strict=True)
        ]
        return first_difference(*sides, steps=steps)


def _decoder(run_dir: Path) -> Decode:
    """Return the run's decoder; of a run whose model is gone, one that gives no text."""
    try:
        return decoder(run_dir)
    except AsyncRLError:
        return lambda _: ""


def sentences(directories: tuple[Path, Path], found: Found) -> Iterator[str]:
    """Yield the sentences that name the first difference of two runs."""
    names = [path.name for path in directories]
    if found.num_steps == 0:
        yield f"{names[0]} and {names[1]} have no step in common yet"
        return
    difference = found.difference
    if difference is None:
        yield f"no difference in the {found.num_steps} steps that both runs have"
    else:
        where = f"{difference.subject}, {difference.where}"
        yield f"the runs first differ at step {difference.step}: {where}"
        for name, value in zip(names, difference.values, strict=True):
            yield f"  {name}: {value}"
    for note in found.notes:
        yield f"not compared: {note}"


def differing_settings(one: Path, other: Path) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, by path."""
    changed = changes(config_of(one), config_of(other))
    return {
        path: (schema.show(old), schema.show(new))
        for path, (old, new) in changed.items()
        if path not in _NOT_OBJECTIVE
    }


def result_table(one: Rows, other: Rows) -> dict[str, tuple[str, str]]:
    """Return the metrics of the first charts, each as the mean of its last fifth of steps."""
    names = [name for _, group in FIRST_SCREEN for name in group]
    return _means(one, other, names, share=0.2)


def time_table(one: Rows, other: Rows) -> dict[str, tuple[str, str]]:
    """Return the mean seconds of each stage over all steps."""
    known = {name for rows in (one, other) for row in rows.values() for name in row}
    return _means(one, other, sorted(n for n in known if n.startswith(_TIMES)), share=1.0)


def _means(one: Rows, other: Rows, names: list[str], *, share: float) -> dict[str, tuple[str, str]]:
    table = {}
    for name in names:
        values = [_mean(rows, name, share) for rows in (one, other)]
        if any(value is not None and abs(value) >= _LEAST_S for value in values):
            first, second = ("-" if value is None else f"{value:.4g}" for value in values)
            table[name] = first, second
    return table


def _mean(rows: Rows, name: str, share: float) -> float | None:
    column = np.array([row[name] for _, row in sorted(rows.items()) if name in row])
    column = column[np.isfinite(column)]
    if not len(column):
        return None
    return float(column[-max(1, round(share * len(column))) :].mean())


def _table(directories: tuple[Path, Path], lines: Mapping[str, tuple[str, str]]) -> Table:
    table = open_table("", *(path.name for path in directories))
    for name, values in lines.items():
        # rich would read a list of paths, [/a/b], as a closing tag, and fail.
        table.add_row(name, *map(escape, values))
    return table


def write_page(
    file: Path,
    directories: tuple[Path, Path],
    lines: list[str],
    tables: Mapping[str, Mapping[str, tuple[str, str]]],
) -> None:
    """Write one HTML file with the curves of both runs, without scripts or other files."""
    require("jinja2", "--html")
    from async_rl.runs.view import pages
    from async_rl.runs.view.library import RunView

    with ThreadPoolExecutor(max_workers=1) as calls:
        shown = [RunView(path, calls) for path in directories]
        content = pages.curves(shown, smoothing=0.0, x="step", section="")
    file.write_text(rendered("compare.html", lines=lines, tables=tables, **content))
