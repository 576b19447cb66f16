"""Reports on runs, printed on the terminal."""

from __future__ import annotations

from async_rl.launchers.commands.options import console
from async_rl.monitoring.terminal import open_table
from async_rl.runs.report import Report


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
