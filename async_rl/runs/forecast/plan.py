"""Forecasts of a run with other settings: a row of a table for every combination of values."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from async_rl.composition.problems import hint
from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.scenario import FIELDS, Profile, Scenario, Values, with_values
from async_rl.runs.forecast.simulation import Forecast, simulate
from async_rl.runs.report import Report, Section, Table

_MAY_BE_ZERO = ("buffer.max_staleness_versions", "evaluation.every_steps")
_MOST_ROWS = 400  # a table of this length is still read; a simulation takes about 10 ms
_RANGE = ".."
_TOKENS = ("buffer.groups_per_step", "generation.group_size", "data.max_response_tokens")
"""Settings that change the tokens of a batch."""

UNKNOWN_SLOWDOWN = (
    "assumed: samples in flight do not slow each other down, because the recording does not show by"
    " how much they do; with more of them in flight, forecasts are upper bounds"
)

Sweep = Mapping[str, Sequence[float]]
"""The values to forecast, by setting."""


def sweep(settings: Sequence[str]) -> Sweep:
    """Read KEY=VALUE[,VALUE]... and KEY=A..B. Raises ConfigError for a setting whose effect is
    unknown.
    """
    swept: dict[str, list[float]] = {}
    for word in settings:
        path, _, text = word.partition("=")
        # The speeds, of which explain tries some, have names without a dot.
        known = [name for name in FIELDS if "." in name]
        if path not in known:
            remedy = hint(path, among=known)
            raise ConfigError(f"{word}: the forecast knows no effect of {path}; {remedy}")
        swept[path] = list(_numbers(word, path, text))
    num_rows = math.prod(map(len, swept.values()))
    if num_rows > _MOST_ROWS:
        raise ConfigError(f"{num_rows} combinations; give values for at most {_MOST_ROWS}")
    return swept


def _numbers(word: str, path: str, text: str) -> Iterator[float]:
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


def plan(profile: Profile, swept: Sweep) -> Report:
    """Forecast every combination of the values."""
    rows = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        scenario = with_values(profile, chosen)
        forecast = simulate(scenario, profile.recorded)
        rows.append(tuple(_cells(chosen, scenario, forecast)))
    columns = (*swept, "steps/hour", "groups/hour", "learner waits", "generators idle", "age")
    section = Section(
        lines=tuple(_inputs(profile, swept)),
        table=Table(columns=columns, rows=tuple(rows)),
    )
    return Report(title="Forecasts with other settings", sections=(section,))


def _inputs(profile: Profile, swept: Sweep) -> Iterator[str]:
    """Yield the source of each input of the forecast."""
    recorded = profile.recorded
    yield (
        f"measured in {profile.origin}: generation, scoring, training and push times"
        f"{', and how samples in flight slow each other down' if recorded.beside else ''};"
        f" {recorded.num_generators} generators, {recorded.steps_per_s * 3600:.0f} steps/hour"
    )
    if not recorded.beside:
        yield UNKNOWN_SLOWDOWN
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


def _cells(chosen: Values, scenario: Scenario, forecast: Forecast) -> Iterator[str]:
    yield from (f"{value:g}" for value in chosen.values())
    per_hour = forecast.steps_per_s * 3600
    yield f"{per_hour:.0f}"
    yield f"{per_hour * scenario.groups_per_step:.0f}"
    yield f"{forecast.learner_waits:.0%}"
    yield f"{forecast.generators_idle:.0%}"
    yield f"{forecast.age:.2f}"
