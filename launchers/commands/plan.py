"""`async-rl plan`: a table of forecasts of a recorded run with other settings."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers.commands.options import OutputDir, complete_run
from async_rl.launchers.commands.reports import print_report
from async_rl.runs.directory import find_run
from async_rl.runs.forecast import plan as planning
from async_rl.runs.forecast.scenario import (
    FIELDS,
    Profile,
    profile_of,
    read_profile,
    write_profile,
)
from async_rl.runs.status import config_of

_CALIBRATION = ("num_steps=24", "evaluation.every_steps=0", "monitoring.tensorboard_port=null")
"""Long enough for a warm-up of five steps and a mean over the later steps."""


def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN KEY=VALUE[,VALUE]...",
            help="a run or profile=FILE, and values; every combination is forecast",
            autocompletion=complete_run,
        ),
    ],
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="measure a short run of these settings first")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the measured times as a profile")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="also show the hours to this number of steps")
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(metavar="G,L", help="per hour and generator, per hour and learner rank"),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=2, help="only splits into generators and ranks of so many")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Forecast steps per hour, waits, age, memory, time and cost with other settings.

    Examples: async-rl plan my-run generators.count=1..4 buffer.max_staleness_versions=0,2;
    async-rl plan --calibrate --save here.json conf=grpo_code generators.count=1,2;
    async-rl plan profile=here.json --devices 8 --steps 500. async-rl view draws the same as curves.
    """
    others = [word for word in words if word.partition("=")[0] not in FIELDS]
    settings = [word for word in words if word not in others]
    options = planning.Options(devices=devices, num_steps=steps, prices=_costs(prices))
    is_from_file = False
    if calibrate:
        swept = planning.sweep(settings, devices=devices)
        profile = _measured(others)
    else:
        if not others:
            raise ConfigError("name a run, profile=FILE, or --calibrate with the settings of a run")
        # Any other word with = is a setting without an effect, which the sweep refuses by name.
        source, *unknown = others
        swept = planning.sweep([*settings, *unknown], devices=devices)
        file = source.removeprefix("profile=")
        is_from_file = file != source
        if is_from_file:
            profile = read_profile(Path(file))
        else:
            run_dir = find_run(source, output_dir)
            profile = profile_of(run_dir, config_of(run_dir))
    # Before the table: its columns can be repeated from the file.
    if save is not None:
        write_profile(profile, save)
    print_report(planning.plan(profile, swept, options, is_from_file=is_from_file))


def _measured(settings: Sequence[str]) -> Profile:
    """Run the settings for some steps and return their times."""
    # Settings of the person win, for example another number of steps.
    given = {word.partition("=")[0] for word in settings}
    defaults = [word for word in _CALIBRATION if word.partition("=")[0] not in given]
    command = [sys.executable, "-m", "async_rl.launchers.cli", "launch", *settings, *defaults]
    with tempfile.TemporaryDirectory(prefix="calibration-") as scratch:
        where = [f"output_dir={scratch}", "run_name=calibration"]
        # As Ctrl-C: the run must not continue without this command.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with subprocess.Popen([*command, *where]) as launched:
            try:
                code = launched.wait()
            except KeyboardInterrupt:
                launched.terminate()
                raise
        if code:
            raise InfrastructureError(
                f"the calibration exited with code {code}; its last lines are above"
            )
        run_dir = Path(scratch, "calibration")
        return profile_of(run_dir, config_of(run_dir))


def _costs(prices: str | None) -> tuple[float, float] | None:
    """Read G,L. Raises ConfigError."""
    if prices is None:
        return None
    try:
        generator, learner = map(float, prices.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--prices {prices}: give two numbers, for example --prices 2.5,2.5"
        ) from error
    return generator, learner
