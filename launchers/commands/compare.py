"""`async-rl compare`: where two runs part, and how settings, results and times differ."""

from __future__ import annotations

from async_rl.core.extras import require
from async_rl.launchers.commands.options import OutputDir, RunName
from async_rl.launchers.commands.reports import Html, print_report, refuse_existing, write_page
from async_rl.runs import comparison
from async_rl.runs.directory import find_run


def compare(
    one: RunName,
    other: RunName,
    html: Html = None,
    output_dir: OutputDir = None,
) -> None:
    """Find the first step and input that differ between two runs; compare settings, results, times.

    Examples: async-rl compare run-1 run-2; async-rl compare run-1 run-2 --html pair.html
    """
    first = find_run(one, output_dir)
    second = find_run(other, output_dir)
    refuse_existing(html)
    # Without a page the curves, which need jinja2, are not drawn.
    if html is None:
        print_report(comparison.compare(first, second))
        return
    require("jinja2", "--html")
    from async_rl.runs.view import pages
    from async_rl.runs.view.library import RunView

    report = pages.comparison(RunView(first), RunView(second))
    print_report(report)
    write_page(html, report)
