"""Measures properties of this machine and writes a report: `python -m benchmarks.qualification`."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from async_rl.composition.overrides import with_defaults
from async_rl.core.errors import ConfigError
from async_rl.core.extras import missing
from async_rl.core.machine import read_gpus, this_machine
from async_rl.launchers.cli import run
from async_rl.launchers.commands.options import console
from async_rl.monitoring.terminal import open_table
from benchmarks.qualification.catalogue import (
    Qualification,
    engine_settings,
    qualifications,
    reason_to_skip,
)
from benchmarks.qualification.report import Result, as_html, make_report
from benchmarks.qualification.running import judge
from benchmarks.qualification.runs import num_alive_nodes

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "dim"}


def qualify(
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value settings, for example model.path=...")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="name of a qualification; may be repeated")
    ] = None,
    out: Annotated[Path, typer.Option(help="directory of the report")] = Path("qualify"),
    list_only: Annotated[
        bool, typer.Option("--list", help="list the qualifications and run none")
    ] = False,
) -> None:
    """Measure log-probs, pushes, rates and memory on this machine. Writes report.html and
    report.json, to attach to an issue. Exit code 1 if one failed.

    Examples: python -m benchmarks.qualification; python -m benchmarks.qualification --only
    parity_bfloat16 model.path=/models/policy
    """
    chosen = _chosen(only or [])
    if list_only:
        _show_list(chosen)
        return
    machine, gpus = this_machine(), read_gpus()
    num_nodes = _ray_nodes() if any(entry.nodes > 1 for entry in chosen) else 1
    given = with_defaults(settings or [], engine_settings())
    if given != (settings or []):
        console().print(f"vLLM is not installed: {' '.join(engine_settings())}")
    results = []
    for entry in chosen:
        skip = reason_to_skip(entry, num_gpus=machine.num_gpus, num_nodes=num_nodes)
        results.append(judge(entry, given, skip=skip))
        _show(results[-1])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = shlex.join(["python", "-m", __package__, *sys.argv[1:]])
    report = make_report(results, machine, gpus, command=command, created=now)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    (out / "report.html").write_text(as_html(report))
    console().print(f"{out / 'report.html'} and report.json can be attached to an issue")
    raise typer.Exit(int(any(result.verdict == "failed" for result in results)))


def _chosen(names: list[str]) -> list[Qualification]:
    known = {entry.name: entry for entry in qualifications()}
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: no such qualification; use {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def _show_list(chosen: list[Qualification]) -> None:
    table = open_table("name", "what it shows", "needs", "limits")
    for entry in chosen:
        table.add_row(entry.name, entry.title, entry.needs, "; ".join(map(str, entry.limits)))
    console().print(table)


def _show(result: Result) -> None:
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
    line = Text(f"{result.verdict:8}", style=_STYLES[result.verdict])
    line.append(f"{result.name}  ", style="bold").append(result.reason or numbers, style="")
    console().print(line)


def _ray_nodes() -> int:
    """Return the machines of the Ray cluster that RAY_ADDRESS names; 1 without one."""
    if not os.environ.get("RAY_ADDRESS") or missing("ray", "launcher=ray"):
        return 1
    return max(1, num_alive_nodes())


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
app.command()(qualify)

if __name__ == "__main__":
    run(app)
