"""`async-rl plan`: a table of forecasts of a recorded run with other settings."""

from typing import Annotated

import typer

from async_rl.launchers.commands.options import OutputDir, RunName
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.directory import find_run
from async_rl.runs.forecast import plan as planning
from async_rl.runs.forecast.scenario import profile_of
from async_rl.runs.status import config_of


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
    swept = planning.sweep(settings or [])
    run_dir = find_run(run, output_dir)
    profile = profile_of(run_dir, config_of(run_dir))
    print_report(planning.plan(profile, swept))
