"""Reports on runs: printed on the terminal, or written as a page of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError
from async_rl.core.extras import require
from async_rl.launchers.commands.options import console, open_table
from async_rl.runs.report import Report

Html = Annotated[Path | None, typer.Option("--html", help="also write this as a page of one file")]


def refuse_existing(html: Path | None) -> None:
    """Raise ConfigError if the file exists."""
    if html is not None and html.exists():
        raise ConfigError(f"--html {html}: the file exists; choose another name or delete it")


def print_report(report: Report) -> None:
    """Print the sections, with a blank line between them. Graphs are left to the web view."""
    terminal = console()
    for number, section in enumerate(report.sections):
        if number:
            terminal.print()
        if section.title:
            terminal.print(section.title, style="bold")
        for line in section.lines:
            terminal.print(line, soft_wrap=True)
        if section.table is not None:
            table = open_table(*section.table.columns)
            for row in section.table.rows:
                table.add_row(*row)
            terminal.print(table)


def write_page(html: Path, report: Report) -> None:
    """Write a report as a page. Raises ConfigError without the extra of the web view."""
    require("jinja2", "--html")
    from async_rl.runs.view.server import page_of

    html.write_text(page_of(report))
    console().print(f"\nthe page is in {html}", soft_wrap=True)
