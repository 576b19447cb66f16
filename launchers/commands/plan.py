"""`async-rl plan`: what a recorded run would do with other settings, as a table of forecasts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from async_rl.buffer.store.times import MOST_GROUPS
from async_rl.composition.fitting import model_shape
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.launchers.commands.options import OutputDir, complete_run, console, open_table
from async_rl.launchers.commands.pages import refuse_existing
from async_rl.launchers.commands.plan_page import write_page
from async_rl.planning.estimate import memory_mb, total_memory_mb
from async_rl.runs.config import config_of
from async_rl.runs.directory import find_run
from async_rl.runs.forecast.live import refuse_unsimulated
from async_rl.runs.forecast.profile import Profile, read_profile, write_profile
from async_rl.runs.forecast.recorded import read_times
from async_rl.runs.forecast.scoring import setting_of
from async_rl.runs.forecast.simulation import Forecast, scenario_of, simulate
from async_rl.runs.forecast.sweep import FIELDS, Values, combinations, sweep, with_values

_CALIBRATION = ("num_steps=24", "evaluation.every_steps=0", "monitoring.tensorboard_port=null")
"""Long enough for a warm-up of five steps and a mean over the others."""


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
    html: Annotated[
        Path | None, typer.Option(help="also write curves and table as a page to this file")
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Forecast steps per hour, waits, age, memory, time and cost with other settings.

    Examples: async-rl plan my-run generators.count=1..4 buffer.max_staleness_versions=0,2;
    async-rl plan --calibrate --save here.json conf=grpo_code generators.count=1,2;
    async-rl plan profile=here.json --devices 8 --steps 500
    """
    others = [word for word in words if word.partition("=")[0] not in FIELDS]
    settings = [word for word in words if word not in others]
    if devices is not None and not settings:
        settings = [f"generators.count=1..{devices - 1}", f"learner.ranks=1..{devices - 1}"]
    terminal, cost = console(), _costs(prices)
    refuse_existing(html)
    if calibrate:
        swept, profile = sweep(settings), _measured(others)
    else:
        swept, profile = _source(others, settings, output_dir)
    if save is not None:
        write_profile(profile, save)
    sources = list(inputs(profile, swept, _origin(others)))
    terminal.print("\n".join(sources), soft_wrap=True)
    titles = [*swept, "steps/hour", "groups/hour", "learner waits", "generators idle", "age"]
    titles += ["memory GB", *([f"hours to {steps}"] if steps else []), *(["cost"] if cost else [])]
    rows = list(_forecasts(profile, swept, devices))
    if not rows:
        raise ConfigError(f"--devices {devices}: no combination has as many or fewer devices")
    cells = [list(_cells(profile, *row, steps=steps, cost=cost)) for row in rows]
    terminal.print(_table(titles, cells))
    if html is not None:
        write_page(html, rows, sources, titles, cells)
        terminal.print(f"\nthe page is in {html}", soft_wrap=True)


def _table(titles: Sequence[str], cells: Sequence[list[str]]) -> Table:
    table = open_table(*titles)
    for line in cells:
        table.add_row(*line)
    return table


def _source(
    others: Sequence[str], settings: Sequence[str], output_dir: Path | None
) -> tuple[dict[str, list[float]], Profile]:
    """Return the sweep, and the profile that the words name. Raises ConfigError."""
    if not others:
        raise ConfigError("name a run, profile=FILE, or --calibrate with the settings of a run")
    # Anything else with = is a setting without an effect, which the sweep refuses by name.
    source, *unknown = others
    swept = sweep([*settings, *unknown])
    file = source.removeprefix("profile=")
    if file != source:
        return swept, read_profile(Path(file))
    return swept, profile_of(find_run(source, output_dir))


def profile_of(run_dir: Path, *, most: int = MOST_GROUPS) -> Profile:
    """Return the measured times of the newest groups, at most so many. Raises ConfigError if they
    cannot be forecast from.
    """
    config = config_of(run_dir)
    refuse_unsimulated(config)
    recorded = read_times(run_dir, config, most=most)
    shape = model_shape(config)
    return Profile(
        origin=run_dir.name,
        recorded=recorded,
        scenario=scenario_of(config, recorded),
        ranks=config.learner.ranks,
        group_size=config.generation.group_size,
        generator_mb=None if shape is None else memory_mb(config, "generator", shape),
        total_mb=None if shape is None else total_memory_mb(config, shape),
        place_setting=setting_of(config)[0],
        verifier_mb=memory_mb(config, "verifier", shape),
    )


def _measured(settings: Sequence[str]) -> Profile:
    """Run the settings for some steps and return their times."""
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
                f"the calibration ended with exit code {code}; its last lines are above"
            )
        return profile_of(Path(scratch, "calibration"))


def _origin(others: Sequence[str]) -> str:
    is_profile = any(word.startswith("profile=") for word in others)
    return "from a profile of" if is_profile else "measured in"


def inputs(profile: Profile, swept: dict[str, list[float]], source: str) -> Iterator[str]:
    """Yield where each input of the forecast comes from."""
    recorded = profile.recorded
    yield (
        f"{source} {profile.origin}: generation, scoring, training and push times, and how samples"
        f" in flight slow each other down; {recorded.num_generators} generators,"
        f" {recorded.steps_per_s * 3600:.0f} steps/hour"
    )
    yield "computed: memory, by the plan of async-rl launch"
    yield (
        "assumed: additional generators have separate cores or GPUs and are as fast as the"
        " recorded ones"
    )
    sizes = ("buffer.groups_per_step", "generation.group_size", "data.max_response_tokens")
    if any(path in swept for path in sizes):
        share = recorded.by_tokens
        source = "assumed: all" if share is None else f"measured: {share:.0%}"
        yield f"{source} of the learner's time grows with the tokens of its batch"
    if "generation.group_size" in swept:
        yield "assumed: further samples of a group are as long as those of the next groups"
    if "data.max_response_tokens" in swept:
        yield "assumed: responses that ended at the recorded limit do not become longer"
    if "learner.ranks" in swept:
        yield "assumed: a learner with twice the ranks is twice as fast"


def _forecasts(
    profile: Profile, swept: dict[str, list[float]], devices: int | None
) -> Iterator[tuple[Values, Forecast]]:
    for chosen in combinations(swept):
        if devices is None or sum(_split(profile, chosen)) <= devices:
            yield chosen, simulate(with_values(profile, chosen), profile.recorded)


def _split(profile: Profile, chosen: Values) -> tuple[float, float]:
    """Return generators and learner ranks."""
    generators = chosen.get("generators.count", profile.scenario.generators)
    return generators, chosen.get("learner.ranks", profile.ranks)


def _cells(
    profile: Profile,
    chosen: Values,
    forecast: Forecast,
    *,
    steps: int | None,
    cost: tuple[float, float] | None,
) -> Iterator[str]:
    yield from (f"{value:g}" for value in chosen.values())
    per_hour = forecast.steps_per_s * 3600
    groups = chosen.get("buffer.groups_per_step", profile.scenario.groups_per_step)
    yield f"{per_hour:.0f}"
    yield f"{per_hour * groups:.0f}"
    yield f"{forecast.learner_waits:.0%}"
    yield f"{forecast.generators_idle:.0%}"
    yield f"{forecast.age:.2f}"
    generators, ranks = _split(profile, chosen)
    if profile.total_mb is None or profile.generator_mb is None:
        yield "unknown"
    else:
        base = profile.scenario
        verifiers = chosen.get("verifiers.count", base.verifiers) - base.verifiers
        more_mb = (generators - base.generators) * profile.generator_mb
        yield f"{(profile.total_mb + more_mb + verifiers * profile.verifier_mb) / 1024:.1f}"
    if not per_hour:
        yield from ["never" for given in (steps, cost) if given is not None]
        return
    if steps is not None:
        yield f"{steps / per_hour:.2f}"
    if cost is not None:
        per_step = (generators * cost[0] + ranks * cost[1]) / per_hour
        yield f"{per_step * (steps or 1000):.2f}"


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
