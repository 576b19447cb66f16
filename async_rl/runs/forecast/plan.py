"""Forecasts of a run with other settings: a row of a table for every combination of values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from async_rl.composition.problems import nearest
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.runs.forecast.scenario import FIELDS, Profile, Scenario, Values, with_values
from async_rl.runs.forecast.simulation import Forecast, simulate
from async_rl.runs.report import Graph, Report, Section, Series, Table

_MAY_BE_ZERO = ("buffer.max_staleness_versions", "evaluation.every_steps")
_MOST_ROWS = 400  # a table of this length is still read; a simulation takes about 10 ms
_RANGE = ".."
_TOKENS = ("buffer.groups_per_step", "generation.group_size", "data.max_response_tokens")
"""Settings that change the tokens of a batch."""

Sweep = Mapping[str, Sequence[float]]
"""The values to forecast, by setting."""


@frozen
class Options:
    """Further columns and rows. devices: generators and learner ranks together, at most. num_steps:
    show the hours to this step. prices: per hour, of a generator and of a learner rank.
    """

    devices: int | None = None
    num_steps: int | None = None
    prices: tuple[float, float] | None = None


def sweep(settings: Sequence[str], *, devices: int | None = None) -> Sweep:
    """Read KEY=VALUE[,VALUE]... and KEY=A..B; without settings every split of the devices.

    Raises ConfigError for a setting whose effect is unknown.
    """
    # The default question about a number of devices is how to divide them.
    if devices is not None and not settings:
        settings = [f"generators.count=1..{devices - 1}", f"learner.ranks=1..{devices - 1}"]
    swept: dict[str, list[float]] = {}
    for word in settings:
        path, _, text = word.partition("=")
        if path not in FIELDS:
            best = nearest(path, among=list(FIELDS))
            # A typing error has a neighbour; any other word gets the whole list.
            hint = f"; did you mean {best}?" if best else f"; there are {', '.join(FIELDS)}"
            raise ConfigError(f"{word}: the forecast knows no effect of {path}{hint}")
        swept[path] = list(_numbers(word, path, text))
    num_rows = math.prod(map(len, swept.values()))
    if num_rows > _MOST_ROWS:
        raise ConfigError(f"{num_rows} combinations; give values for at most {_MOST_ROWS}")
    return swept


def _numbers(word: str, path: str, text: str) -> Iterator[float]:
    # Speeds have names without a dot, because they are not settings of a run.
    if "." not in path:
        yield from (_speed(word, part) for part in text.split(","))
        return
    # 0 means synchronous, or no evaluation.
    least = 0 if path in _MAY_BE_ZERO else 1
    for part in text.split(","):
        bounds = part.split(_RANGE)
        for bound in bounds:
            if not bound.isdecimal() or int(bound) < least:
                raise ConfigError(f"{word}: {bound!r} is not a whole number >= {least}")
        # A single number is a range of one value; 4..1 is 1..4.
        numbers = sorted(map(int, bounds))
        yield from range(numbers[0], numbers[-1] + 1)


def _speed(word: str, text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1000:
        raise ConfigError(
            f"{word}: {text!r} is not a speed; 1 is the recorded speed, 2 twice as fast"
        )
    return speed


def plan(profile: Profile, swept: Sweep, options: Options, *, is_from_file: bool = False) -> Report:
    """Forecast every combination of the values. Raises ConfigError if none is left."""
    rows = list(forecasts(profile, swept, options.devices))
    if not rows:
        raise ConfigError(
            f"--devices {options.devices}: no combination has as many or fewer devices"
        )
    columns = [*swept, "steps/hour", "groups/hour", "learner waits", "generators idle", "age"]
    columns.append("memory GB")
    if options.num_steps is not None:
        columns.append(f"hours to {options.num_steps}")
    if options.prices is not None:
        columns.append("cost")
    cells = tuple(tuple(_cells(profile, *row, options)) for row in rows)
    section = Section(
        lines=tuple(_inputs(profile, swept, is_from_file=is_from_file)),
        table=Table(columns=tuple(columns), rows=cells),
        graphs=_graphs(rows),
    )
    return Report(title="Forecasts with other settings", sections=(section,))


def forecasts(
    profile: Profile, swept: Sweep, devices: int | None
) -> Iterator[tuple[Values, Scenario, Forecast]]:
    """Yield the values of each combination that fits the devices, and its forecast."""
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        scenario = with_values(profile, chosen)
        if devices is None or scenario.generators + scenario.ranks <= devices:
            yield chosen, scenario, simulate(scenario, profile.recorded)


def _inputs(profile: Profile, swept: Sweep, *, is_from_file: bool) -> Iterator[str]:
    """Yield the source of each input of the forecast."""
    recorded = profile.recorded
    source = "from a profile of" if is_from_file else "measured in"
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
    # Assumptions are listed only where a swept setting makes them matter.
    if any(path in swept for path in _TOKENS):
        share = recorded.by_tokens
        known = "assumed: all" if share is None else f"measured: {share:.0%}"
        yield f"{known} of the learner's time grows with the tokens of its batch"
    if "generation.group_size" in swept:
        yield "assumed: further samples of a group are as long as the samples of the next groups"
    if "data.max_response_tokens" in swept:
        yield "assumed: responses that were cut off at the recorded limit do not become longer"
    if "learner.ranks" in swept:
        yield "assumed: a learner with twice the ranks is twice as fast"


def _cells(
    profile: Profile, chosen: Values, scenario: Scenario, forecast: Forecast, options: Options
) -> Iterator[str]:
    yield from (f"{value:g}" for value in chosen.values())
    per_hour = forecast.steps_per_s * 3600
    yield f"{per_hour:.0f}"
    yield f"{per_hour * scenario.groups_per_step:.0f}"
    yield f"{forecast.learner_waits:.0%}"
    yield f"{forecast.generators_idle:.0%}"
    yield f"{forecast.age:.2f}"
    yield _memory_gb(profile, scenario)
    if options.num_steps is not None:
        # A run that would stop makes no step.
        yield f"{options.num_steps / per_hour:.2f}" if per_hour else "never"
    if options.prices is not None:
        price = scenario.generators * options.prices[0] + scenario.ranks * options.prices[1]
        # Without a number of steps the cost of 1,000 steps, so that rows can be compared.
        num_steps = options.num_steps or 1000
        yield f"{price / per_hour * num_steps:.2f}" if per_hour else "never"


def _memory_gb(profile: Profile, scenario: Scenario) -> str:
    if profile.total_mb is None or profile.generator_mb is None:
        return "unknown"
    base = profile.scenario
    total_mb = profile.total_mb
    total_mb += (scenario.generators - base.generators) * profile.generator_mb
    total_mb += (scenario.verifiers - base.verifiers) * profile.verifier_mb
    return f"{total_mb / 1024:.1f}"


def _graphs(rows: Sequence[tuple[Values, Scenario, Forecast]]) -> tuple[Graph, ...]:
    """Return curves over the setting with the most values, one line for each combination of the
    other values.
    """
    values = {path: {chosen[path] for chosen, _, _ in rows} for path in rows[0][0]}
    # Lines over the setting with the most values have the most points.
    across = max(values, key=lambda path: len(values[path]), default="")
    if not across or len(values[across]) == 1:
        return ()
    lines: dict[str, list[tuple[float, Forecast]]] = {}
    for chosen, _, forecast in rows:
        label = " ".join(
            f"{path}={value:g}"
            for path, value in chosen.items()
            if path != across and len(values[path]) > 1
        )
        lines.setdefault(label, []).append((chosen[across], forecast))

    def graph(title: str, unit: str, value: Callable[[Forecast], float]) -> Graph:
        series = (
            Series(
                label=label,
                xs=np.array([x for x, _ in line], np.float64),
                ys=np.array([value(forecast) for _, forecast in line], np.float64),
            )
            for label, line in lines.items()
        )
        return Graph(title=title, unit=unit, meaning=f"over {across}", series=tuple(series))

    return (
        graph("steps", "per hour", lambda forecast: forecast.steps_per_s * 3600),
        graph("learner waits", "%", lambda forecast: 100 * forecast.learner_waits),
        graph("mean age", "versions", lambda forecast: forecast.age),
    )
