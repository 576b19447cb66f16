"""The range of a forecast: what its recording leaves open, and how near forecasts are in general.

A recording need not determine how much samples in flight slow each other down, or how the learner's
time grows with its tokens. The range covers the forecasts with all values that it allows, and adds
the error of the simulation of the recorded run itself and that of the measured rate.
"""

from collections.abc import Iterator
from dataclasses import replace

from async_rl.core.frozen import frozen
from async_rl.runs.forecast.scenario import Profile, Values, with_values
from async_rl.runs.forecast.simulation import Forecast, simulate

_USUAL_ERROR = 0.05
"""Of a forecast whose inputs are all measured: 15 of 16 launched runs near the recorded one were
closer, and 19 of 20 drawn ones are inside the whole range (benchmarks/results/forecast.md).
"""
_ERRORS = 2.0  # standard errors of the measured rate
_TRUSTED_DIFFERENCE = 0.05  # of a share of time


@frozen
class Range:
    """A forecast, and the least and largest steps per second that are as possible."""

    forecast: Forecast
    least: float
    most: float


def own_run(profile: Profile) -> Forecast:
    """Simulate the recorded run itself."""
    return simulate(profile.scenario, profile.recorded)


def margin(profile: Profile, own: Forecast) -> float:
    """Return the relative error of forecasts apart from open inputs. own: of the recorded run."""
    error = own.steps_per_s / profile.recorded.steps_per_s - 1
    return _USUAL_ERROR + abs(error) + _ERRORS * profile.recorded.error


def forecast(profile: Profile, chosen: Values, *, error: float) -> Range:
    """Forecast the run with other settings. error: `margin`."""
    rates = {}
    for recorded in (profile.recorded, *profile.others):
        scenario = with_values(replace(profile, recorded=recorded), chosen)
        is_longer = scenario.config.data.max_response_tokens > recorded.cut_tokens > 0
        inputs = recorded.beside, scenario.learner_speed, is_longer
        # Most settings depend on few of the open inputs.
        if inputs not in rates:
            rates[inputs] = simulate(scenario, recorded)
    likeliest, *_ = rates.values()
    all_rates = [each.steps_per_s for each in rates.values()]
    return Range(
        forecast=likeliest, least=min(all_rates) * (1 - error), most=max(all_rates) * (1 + error)
    )


def doubts(profile: Profile, own: Forecast) -> Iterator[str]:
    """Yield what the model does not describe in the recorded run. own: of that run."""
    shares = (
        ("the learner waits", own.learner_waits, profile.recorded.learner_waits),
        ("generators are idle", own.generators_idle, profile.recorded.generators_idle),
    )
    for what, simulated, measured in shares:
        # An unknown share is NaN, which differs from nothing.
        if abs(simulated - measured) > _TRUSTED_DIFFERENCE:
            yield (
                f"{what} {measured:.0%} of the measured time and {simulated:.0%} of the simulated:"
                " the model does not describe this run, and its forecasts are directions at best"
            )
