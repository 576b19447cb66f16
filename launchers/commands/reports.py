"""The commands that report on runs: `async-rl explain`, `plan`, `compare` and `certify` print, and
`async-rl view` serves pages that have the same with graphs, until it is interrupted.

Invariants of view: it only reads; it binds loopback by default; every request needs the printed
token.
"""

import secrets
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands.options import (
    AsJson,
    OutputDir,
    Port,
    Run,
    RunName,
    console,
    print_table,
)
from async_rl.runs.directory import default_output_dir, find_run
from async_rl.runs.report import Report
from async_rl.runs.status import config_of


def explain(run: Run = None, output_dir: OutputDir = None) -> None:
    """Show where a run's time went by process and stage, and predict the gain of changes.

    Works on finished and on live runs; a page of `async-rl view` has the same. Examples: async-rl
    explain; async-rl explain my-run
    """
    from async_rl.runs.forecast import reports

    report = reports.explain(find_run(run, output_dir))
    console().print(f"{report.title}\n")
    print_report(report)


def plan(
    run: RunName,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE[,VALUE]...", help="values; every combination is forecast"
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Forecast steps per hour, waits and age with other settings.

    Examples: async-rl plan my-run generators.count=1..4 buffer.max_staleness_versions=0,2
    """
    from async_rl.runs.forecast import reports
    from async_rl.runs.forecast.scenario import profile_of

    swept = reports.sweep(settings or [])
    run_dir = find_run(run, output_dir)
    profile = profile_of(run_dir, config_of(run_dir))
    print_report(reports.plan(profile, swept))


def compare(one: RunName, other: RunName, output_dir: OutputDir = None) -> None:
    """Find the first step and input that differ between two runs; compare settings, results, times.
    A page of `async-rl view` has the same with the curves of both.

    Examples: async-rl compare run-1 run-2
    """
    from async_rl.runs import comparison

    print_report(comparison.compare(find_run(one, output_dir), find_run(other, output_dir)))


def certify(
    run: Run = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="also write this as a page of one file")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """State what is known about the weights, prompts, selection, seeds, origin and faults of a run,
    each with its evidence. Exit code 0 only if no promise is broken.

    Examples: async-rl certify; async-rl certify my-run --html certificate.html
    """
    from async_rl.runs.certificate import certify as certifying

    run_dir = find_run(run, output_dir)
    certificate = certifying.certify(run_dir)
    report = certificate.report()
    if as_json:
        typer.echo(msgspec.json.encode(certificate))
    else:
        console().print(f"{report.title}\n")
        print_report(report)
    if html is not None:
        from async_rl.runs.view.server import page_of  # of an extra

        with html.open("x") as page:
            page.write(page_of(report))
        console().print(f"\nthe page is in {html}", soft_wrap=True)
    if certificate.broken:
        raise typer.Exit(1)


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


def view(
    run: Annotated[
        str | None,
        typer.Argument(help="name or directory of a run; default: all runs"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="address to bind; other machines reach any but loopback")
    ] = "127.0.0.1",
    port: Port = 0,
    output_dir: OutputDir = None,
) -> None:
    """Show runs in the browser: curves, processes, samples with coloured tokens. Reads only.

    Examples: async-rl view; async-rl view my-run; async-rl view
    --output-dir /data/runs --port 8200
    """
    page = "/"
    if run is not None:
        run_dir = find_run(run, output_dir)
        # The page has the other runs of the directory as well.
        directory = run_dir.parent
        page = f"/runs/{quote(run_dir.name, safe='')}"
    else:
        directory = (output_dir or default_output_dir()).absolute()
    if not directory.is_dir():
        raise ConfigError(f"{directory} does not exist; give --output-dir of runs, or start one")
    from async_rl.runs.view.server import serve  # of an extra, which the error names

    token = secrets.token_urlsafe()

    def ready(url: str) -> None:
        typer.echo(f"runs of {directory} at {url}{page}?token={token}")
        typer.echo("Ctrl-C ends it")

    serve(directory, host=host, port=port, token=token, ready=ready)
