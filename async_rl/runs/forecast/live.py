"""The forecast of a run while it runs, for the autoscaler: steps per second by generators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from async_rl.config.run import RunConfig
from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.recorded import read_times
from async_rl.runs.forecast.simulation import scenario_of, simulate

TRUSTED_ERROR = 0.1
_STEPS = 24  # enough for a mean, few enough that a changed number of generators shows soon


def newest_groups(config: RunConfig) -> int:
    """Return how many groups a forecast of a live run reads."""
    return _STEPS * config.buffer.groups_per_step


def refuse_unsimulated(config: RunConfig) -> None:
    """Raise ConfigError for a run whose order of events is not simulated."""
    if config.placement == "colocated":
        raise ConfigError("placement=colocated: turns of generators and learner are not simulated")


def live_rates(run_dir: Path, config: RunConfig, numbers: Sequence[int]) -> dict[int, float]:
    """Return the forecast steps per second by the number of training generators.

    numbers: the first is the present number. Raises ConfigError if the recording is off or too
    short, or if the simulation of the present number misses the measured rate.
    """
    if config.recording == "off":
        raise ConfigError("recording=off")
    refuse_unsimulated(config)
    recorded = read_times(run_dir, config, most=newest_groups(config))
    scenario = scenario_of(config, recorded)
    rates = {
        number: simulate(replace(scenario, generators=number), recorded).steps_per_s
        for number in numbers
    }
    error = rates[numbers[0]] / recorded.steps_per_s - 1
    if abs(error) > TRUSTED_ERROR:
        raise ConfigError(f"the simulated rate differs from the measured one by {error:+.0%}")
    return rates
