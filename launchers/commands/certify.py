"""`async-rl certify`: the certificate of a run, to attach to a result."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from async_rl.core.extras import require
from async_rl.launchers.commands.options import AsJson, OutputDir, Run, console
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.certificate.certify import certify as make_certificate
from async_rl.runs.directory import find_run


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
    run_dir = find_run(run, output_dir)
    if html is not None:
        require("jinja2", "--html")
    certificate = make_certificate(run_dir)
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
