"""Reports on runs, printed on the terminal."""

from collections.abc import Iterable, Sequence

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
            print_table(section.table.columns, section.table.rows)


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
