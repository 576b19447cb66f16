"""A run to forecast: its recorded times, its settings, and the same run with other settings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from async_rl.config.base import with_settings
from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.runs.forecast.recorded import Recorded, Work, read_times
from async_rl.runs.forecast.scoring import PLACE_SETTINGS, setting_of

KNOWN = (
    "generators.count",
    "generation.max_concurrent_groups",
    "generation.group_size",
    "data.max_response_tokens",
    "buffer.groups_per_step",
    "buffer.max_staleness_versions",
    "weights.push_every_steps",
    "evaluation.every_steps",
    "learner.ranks",
    "verifiers.count",
    *PLACE_SETTINGS,
)
"""The settings whose effect can be forecast."""
_SIZE = "generation.group_size"
_LIMIT = "data.max_response_tokens"
Values = Mapping[str, float]
"""Values of settings of KNOWN, and of `learner_speed`, `scoring_speed` and `generation_speed`: 1 is
the speed of the recorded run.
"""


@frozen
class Scenario:
    """The run to simulate. config: its settings. chosen: what differs from the recorded run.
    learner_speed: with the effect of the settings.
    """

    config: RunConfig
    chosen: Values = field(default_factory=dict)
    learner_speed: float = 1.0


@frozen
class Profile:
    """origin: name of the measured run. scenario: that run as it was recorded. others: times that
    its recording allows as well.
    """

    origin: str
    recorded: Recorded
    scenario: Scenario
    others: Sequence[Recorded] = ()


def profile_of(run_dir: Path, config: RunConfig) -> Profile:
    """Return the measured times of the newest groups. Raises ConfigError if they are too few
    or if the order of events of the run is not simulated.
    """
    if config.takes_turns:
        raise ConfigError("placement=colocated: turns of generators and learner are not simulated")
    recorded, *others = read_times(run_dir, config)
    settings = {"generators.count": recorded.num_generators, "num_steps": len(recorded.step_s)}
    # Without a recorded evaluation its duration is unknown.
    if not recorded.evaluation:
        settings["evaluation.every_steps"] = 0
    scenario = Scenario(config=with_settings(config, settings))
    return Profile(origin=run_dir.name, recorded=recorded, scenario=scenario, others=others)


def with_values(profile: Profile, chosen: Values) -> Scenario:
    """Return the scenario of the profile with other values of settings. Raises ConfigError for a
    setting that limits the scoring of other runs only.
    """
    base = profile.scenario
    place_setting, _ = setting_of(base.config)
    for path in chosen:
        if path in PLACE_SETTINGS and path != place_setting:
            raise ConfigError(
                f"{path}: the forecast knows no effect of it, as this run scores by {place_setting}"
            )
    settings = {path: value for path, value in chosen.items() if path in KNOWN}
    config = with_settings(base.config, settings)
    # The learner's time grows with the tokens of its batch and falls with the number of ranks.
    tokens = config.buffer.groups_per_step / base.config.buffer.groups_per_step
    both = profile.recorded.train, changed_works(profile.recorded, chosen)
    before, after = (sum(sum(work.lengths) for work in works) for works in both)
    # A recording may lack the lengths.
    tokens *= after / before if before else 1.0
    share = profile.recorded.by_tokens
    slower = 1 - share + share * tokens
    # Assumed, and the plan says so: twice the ranks are twice as fast.
    faster = config.learner.ranks / base.config.learner.ranks
    speed = chosen.get("learner_speed", 1.0) / slower * faster
    return Scenario(config=config, chosen=chosen, learner_speed=speed)


def changed_works(recorded: Recorded, chosen: Values) -> tuple[Work, ...]:
    """Return the work of groups of another size, or with another limit of the response.

    A larger group takes its further samples from the next groups.
    """
    if _SIZE not in chosen and _LIMIT not in chosen:
        return recorded.train
    return tuple(_changed(recorded, index, chosen) for index in range(len(recorded.train)))


def _changed(recorded: Recorded, index: int, chosen: Values) -> Work:
    works = recorded.train
    work = works[index]
    size = int(chosen.get(_SIZE, len(work.lengths)))
    # Every group has at least one sample, so `size` groups have enough of them.
    sources = [works[(index + further) % len(works)] for further in range(size)]
    lengths = [length for source in sources for length in source.lengths][:size]
    scores = tuple(score for source in sources for score in source.scores)[:size]
    if _LIMIT in chosen:
        limit = int(chosen[_LIMIT])
        cut = recorded.cut_tokens or math.inf
        lengths = [limit if length >= cut else min(length, limit) for length in lengths]
    # The time before the first token does not depend on the lengths.
    ratio = work.first + (1 - work.first) * max(lengths) / max(work.lengths)
    return replace(
        work,
        units=work.units * ratio,
        load=sum(lengths) / max(lengths),
        lengths=tuple(lengths),
        scores=scores,
    )
