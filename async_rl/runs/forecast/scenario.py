"""A run to forecast: its recorded times, its settings, and the same run with other settings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rl.buffer.pace import is_paced
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.runs.forecast.recorded import Recorded, Work, read_times
from async_rl.runs.forecast.scoring import setting_of

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
"""The settings whose effect can be forecast, and the field of `Scenario` that each one changes."""
Values = Mapping[str, float]
"""Values of settings of FIELDS."""


@frozen
class Scenario:
    """The values that may differ from the recorded run. *_speed: 1 is the recorded speed.
    group_size, max_response_tokens: 0 is as recorded. places: the setting that limits the samples
    scored at the same time in a verifier; 0: unlimited. ranks: of the learner. is_paced: admission
    holds groups back until the learner needs them.
    """

    generators: int
    slots: int
    groups_per_step: int
    max_staleness_versions: int
    push_every_steps: int
    evaluate_every_steps: int
    num_steps: int
    group_size: int = 0
    max_response_tokens: int = 0
    learner_speed: float = 1.0
    scoring_speed: float = 1.0
    generation_speed: float = 1.0
    verifiers: int = 1
    places: int = 0
    ranks: float = 1
    is_paced: bool = True


@frozen
class Profile:
    """origin: name of the measured run. scenario: the settings of that run.
    group_size: samples of a group. place_setting: the setting that limits the samples scored at
    the same time.
    """

    origin: str
    recorded: Recorded
    scenario: Scenario
    group_size: int
    place_setting: str = ""


def profile_of(run_dir: Path, config: RunConfig) -> Profile:
    """Return the measured times of the newest groups. Raises ConfigError if they are too few
    or if the order of events of the run is not simulated.
    """
    if config.takes_turns:
        raise ConfigError("placement=colocated: turns of generators and learner are not simulated")
    recorded = read_times(run_dir, config)
    place_setting, places = setting_of(config)
    return Profile(
        origin=run_dir.name,
        recorded=recorded,
        scenario=Scenario(
            generators=recorded.num_generators,
            slots=config.generation.max_concurrent_groups,
            groups_per_step=config.buffer.groups_per_step,
            max_staleness_versions=config.buffer.max_staleness_versions,
            push_every_steps=config.weights.push_every_steps,
            # Without a recorded evaluation its duration is unknown.
            evaluate_every_steps=config.evaluation.every_steps if recorded.evaluation else 0,
            num_steps=len(recorded.step_s),
            verifiers=config.verifiers.count,
            places=places,
            ranks=config.learner.ranks,
            is_paced=is_paced(config),
        ),
        group_size=config.generation.group_size,
        place_setting=place_setting,
    )


def with_values(profile: Profile, chosen: Values) -> Scenario:
    """Return the scenario of the profile with other values of settings. Raises ConfigError for a
    setting that limits the scoring of other runs only.
    """
    base = profile.scenario
    for path in chosen:
        if FIELDS[path] == "places" and path != profile.place_setting:
            raise ConfigError(
                f"{path}: the forecast knows no effect of it, as this run scores by"
                f" {profile.place_setting}"
            )
    changed: dict[str, Any] = {FIELDS[path]: value for path, value in chosen.items()}
    scenario: Scenario = replace(base, **changed)
    # The learner's time grows with the tokens of its batch and falls with the number of ranks.
    tokens = scenario.groups_per_step / base.groups_per_step
    tokens *= _tokens_ratio(profile.recorded.train, scenario)
    share = 1.0 if profile.recorded.by_tokens is None else profile.recorded.by_tokens
    slower = 1 - share + share * tokens
    # Assumed, and the plan says so: twice the ranks are twice as fast.
    faster = scenario.ranks / base.ranks
    return replace(scenario, learner_speed=scenario.learner_speed / slower * faster)


def changed_works(works: Sequence[Work], scenario: Scenario) -> tuple[Work, ...]:
    """Return the work of groups of another size, or with another limit of the response.

    A larger group takes its further samples from the next groups.
    """
    if not scenario.group_size and not scenario.max_response_tokens:
        return tuple(works)
    return tuple(_changed(works, index, scenario) for index in range(len(works)))


def _changed(works: Sequence[Work], index: int, scenario: Scenario) -> Work:
    work = works[index]
    size = scenario.group_size or len(work.lengths)
    # Every group has at least one sample, so `size` groups have enough of them.
    sources = [works[(index + further) % len(works)] for further in range(size)]
    lengths = [length for source in sources for length in source.lengths][:size]
    scores = tuple(score for source in sources for score in source.scores)[:size]
    if scenario.max_response_tokens:
        lengths = [min(length, scenario.max_response_tokens) for length in lengths]
    # The time before the first token does not depend on the lengths.
    ratio = work.first + (1 - work.first) * max(lengths) / max(work.lengths)
    return replace(
        work,
        units=work.units * ratio,
        load=sum(lengths) / max(lengths),
        lengths=tuple(lengths),
        scores=scores,
    )


def _tokens_ratio(works: Sequence[Work], scenario: Scenario) -> float:
    """Return the response tokens of a changed group relative to a recorded one."""
    if not scenario.group_size and not scenario.max_response_tokens:
        return 1.0
    changed = sum(sum(work.lengths) for work in changed_works(works, scenario))
    return changed / sum(sum(work.lengths) for work in works)
