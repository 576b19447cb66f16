"""The settings that a forecast can change: read from words, and applied to a scenario."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_rl.composition.problems import nearest
from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.profile import Profile
from async_rl.runs.forecast.simulation import Scenario
from async_rl.runs.forecast.variants import tokens_ratio

FIELDS = {
    "generators.count": "generators",
    "generation.max_concurrent_groups": "slots",
    "generation.group_size": "group_size",
    "data.max_response_tokens": "max_response_tokens",
    "buffer.groups_per_step": "groups_per_step",
    "buffer.max_staleness_versions": "max_staleness_versions",
    "weights.push_every_steps": "push_every_steps",
    "evaluation.every_steps": "evaluate_every_steps",
    "learner.ranks": "ranks",
    "verifiers.count": "verifiers",
    "verifiers.cells": "places",
    "reward.concurrency": "places",
    "learner_speed": "learner_speed",
    "scoring_speed": "scoring_speed",
    "generation_speed": "generation_speed",
}
_MAY_BE_ZERO = ("buffer.max_staleness_versions", "evaluation.every_steps")
_MOST_ROWS = 400
_RANGE = ".."

Values = Mapping[str, float]


def sweep(settings: Sequence[str]) -> dict[str, list[float]]:
    """Read KEY=VALUE[,VALUE]... and KEY=A..B. Raises ConfigError for what has no known effect."""
    swept: dict[str, list[float]] = {}
    for word in settings:
        path, _, text = word.partition("=")
        if path not in FIELDS:
            best = nearest(path, among=list(FIELDS))
            hint = f"; did you mean {best}?" if best else f"; there are {', '.join(FIELDS)}"
            raise ConfigError(f"{word}: the forecast knows no effect of {path}{hint}")
        swept[path] = list(_numbers(word, path, text))
    num_rows = math.prod(map(len, swept.values()))
    if num_rows > _MOST_ROWS:
        raise ConfigError(f"{num_rows} combinations; give values for at most {_MOST_ROWS}")
    return swept


def combinations(swept: Mapping[str, Sequence[float]]) -> Iterator[Values]:
    """Yield every combination."""
    for values in itertools.product(*swept.values()):
        yield dict(zip(swept, values, strict=True))


def _numbers(word: str, path: str, text: str) -> Iterator[float]:
    if "." not in path:
        yield from (_speed(word, part) for part in text.split(","))
        return
    least = 0 if path in _MAY_BE_ZERO else 1
    for part in text.split(","):
        bounds = part.split(_RANGE)
        for bound in bounds:
            if not bound.isdecimal() or int(bound) < least:
                raise ConfigError(f"{word}: {bound!r} is not a whole number >= {least}")
        # One number is a range of itself; 4..1 is 1..4.
        numbers = sorted(map(int, bounds))
        yield from range(numbers[0], numbers[-1] + 1)


def _speed(word: str, text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1000:
        raise ConfigError(f"{word}: {text!r} is no speed; 1 is the recorded one, 2 twice as fast")
    return speed


def with_values(profile: Profile, chosen: Values) -> Scenario:
    """Return the scenario of the profile with other values of settings. Raises ConfigError for one
    that limits the scoring of other runs.
    """
    base = profile.scenario
    for path in chosen:
        if FIELDS[path] == "places" and path != profile.place_setting:
            raise ConfigError(
                f"{path}: the forecast knows no effect of it, as this run scores by"
                f" {profile.place_setting}"
            )
    ranks = chosen.get("learner.ranks", profile.ranks)
    changed: dict[str, Any] = {
        FIELDS[path]: value for path, value in chosen.items() if path != "learner.ranks"
    }
    scenario: Scenario = replace(base, **changed)
    # The learner's time grows with the tokens of its batch; with the number of ranks it falls.
    ratio = scenario.groups_per_step / base.groups_per_step
    ratio *= tokens_ratio(profile.recorded.train, scenario)
    grows = 1.0 if profile.recorded.by_tokens is None else profile.recorded.by_tokens
    own = 1 - grows + grows * ratio
    return replace(scenario, learner_speed=scenario.learner_speed / own * ranks / profile.ranks)
