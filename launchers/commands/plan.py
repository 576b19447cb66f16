"""`async-rl plan`: what a recorded run would do with other settings, as a table of forecasts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from async_rl.core.errors import ConfigError
from async_rl.launchers.commands import runs
from async_rl.launchers.commands.options import OutputDir, complete_run, console, open_table
from async_rl.launchers.configuration.problems import nearest
from async_rl.launchers.forecast.recorded import read_times
from async_rl.launchers.forecast.simulation import Scenario, scenario_of, simulate

_FIELDS = {
    "generators.count": "generators",
    "generation.max_concurrent_groups": "slots",
    "buffer.groups_per_step": "groups_per_step",
    "buffer.max_staleness_versions": "max_staleness_versions",
    "weights.push_every_steps": "push_every_steps",
    "evaluation.every_steps": "evaluate_every_steps",
}
_MAY_BE_ZERO = ("buffer.max_staleness_versions", "evaluation.every_steps")
_MOST_ROWS = 400
_SLOW = "; its training time per step is scaled by the size of the batch"


def plan(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="name or directory of a run", autocompletion=complete_run
        ),
    ],
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE[,VALUE]...", help="every combination is forecast"),
    ],
    output_dir: OutputDir = None,
) -> None:
    """Forecast steps per hour, waits and age of a recorded run with other settings.

    Examples: async-rl plan my-run generators.count=1,2,4; async-rl plan my-run
    generators.count=1,2 buffer.max_staleness_versions=0,1,2,4
    """
    run_dir = runs.find(run, output_dir)
    config = runs.config_of(run_dir)
    if config.placement == "colocated":
        raise ConfigError("placement=colocated: turns of generators and learner are not simulated")
    swept = sweep(settings)
    recorded = read_times(run_dir)
    base = scenario_of(config, recorded)
    terminal = console()
    terminal.print(
        "measured in the run: generation, scoring, training and push times, and how groups in"
        f" flight slow each other down; {recorded.num_generators} generators,"
        f" {recorded.steps_per_s * 3600:.0f} steps/hour.\nassumed: additional generators have"
        f" separate cores or GPUs and are as fast as the recorded ones{_SLOW}.\n",
        soft_wrap=True,
    )
    titles = [*swept, "steps/hour", "groups/hour", "learner waits", "generators idle", "age"]
    table = open_table(*titles)
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        scenario = with_values(base, chosen)
        forecast = simulate(scenario, recorded)
        table.add_row(
            *map(str, values),
            f"{forecast.steps_per_s * 3600:.0f}",
            f"{forecast.steps_per_s * 3600 * scenario.groups_per_step:.0f}",
            f"{forecast.learner_waits:.0%}",
            f"{forecast.generators_idle:.0%}",
            f"{forecast.age:.2f}",
        )
    terminal.print(table)


def sweep(settings: Sequence[str]) -> dict[str, list[int]]:
    """Read KEY=VALUE[,VALUE].... Raises ConfigError for what the forecast does not know."""
    swept: dict[str, list[int]] = {}
    for word in settings:
        path, _, text = word.partition("=")
        if path not in _FIELDS:
            best = nearest(path, among=list(_FIELDS))
            hint = f"; did you mean {best}?" if best else f"; there are {', '.join(_FIELDS)}"
            raise ConfigError(f"{word}: the forecast knows no effect of {path}{hint}")
        swept[path] = list(_numbers(word, path, text))
    num_rows = 1
    for values in swept.values():
        num_rows *= len(values)
    if num_rows > _MOST_ROWS:
        raise ConfigError(f"{num_rows} combinations; give values for at most {_MOST_ROWS}")
    return swept


def _numbers(word: str, path: str, text: str) -> Iterator[int]:
    least = 0 if path in _MAY_BE_ZERO else 1
    for part in text.split(","):
        if not part.isdecimal() or int(part) < least:
            raise ConfigError(f"{word}: {part!r} is not a whole number >= {least}")
        yield int(part)


def with_values(base: Scenario, chosen: Mapping[str, int]) -> Scenario:
    """Return the scenario with other values of settings."""
    changed = {_FIELDS[path]: value for path, value in chosen.items()}
    scenario: Scenario = replace(base, **changed)
    # The learner's time grows with its batch.
    speed = base.groups_per_step / scenario.groups_per_step
    return replace(scenario, learner_speed=speed)
