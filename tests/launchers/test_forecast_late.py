"""Played runs whose groups start as early as the age allows, or as late as the learner needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import test_forecast
from test_forecast import other

from async_rl.config.base import with_settings
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.reports import sentences
from async_rl.runs.forecast.scenario import Profile, Scenario
from async_rl.runs.forecast.simulation import Forecast, simulate

NUM_STEPS = 200
BASE = other(test_forecast.BASE, slots=32, groups_per_step=16, num_steps=NUM_STEPS)
RANDOM = np.random.default_rng(0)
STEADY = np.full(1600, 0.2)
HALF_LEAVES = np.where(np.arange(1600) < 800, 0.2, 0.4)
ONE_IN_200 = np.where(RANDOM.random(1600) < 0.005, 2.5, 0.2)


def played(
    scenario: Scenario, units_s: object, steps_s: object = (1.0,), num_evaluated: int = 0
) -> tuple[Forecast, Forecast]:
    """units_s: of each group alone; sixteen at once take 1.75 times as long. steps_s: repeated."""
    recorded = Recorded(
        train=tuple(Work(units=float(s), scoring_s=0.02) for s in np.asarray(units_s)),
        evaluation=(Work(units=0.2, scoring_s=0.02, lengths=(9,) * 4),),
        num_eval_groups=num_evaluated,
        beside=0.05,
        step_s=tuple(np.asarray(steps_s, np.float64).tolist()),
        push_s=0.05,
        num_generators=1,
        num_warm=8,
        steps_per_s=1.0,
    )
    # On a shared device nothing is held back.
    colocated = with_settings(scenario.config, {"placement": "colocated"})
    early = simulate(replace(scenario, config=colocated), recorded)
    return early, simulate(scenario, recorded)


NEVER = (1.0,)


@pytest.mark.parametrize(
    ("units_s", "steps_s", "num_evaluated", "age"),
    [
        # 32 of the next 100 steps until the change is forgotten.
        pytest.param(HALF_LEAVES, NEVER, 0, 1.4, id="half of the fleet leaves"),
        pytest.param(RANDOM.lognormal(-1.6, 0.2, 1600), NEVER, 0, 1.1, id="lengths vary"),
        pytest.param(STEADY, RANDOM.lognormal(0, 0.2, NUM_STEPS), 0, 1.1, id="uneven steps"),
        pytest.param(STEADY, [1.0] * 99 + [60.0], 0, 1.1, id="stalls"),
        pytest.param(STEADY, NEVER, 64, 1.25, id="evaluations"),
    ],
)
def test_groups_that_wait_for_the_learner_start_later_and_delay_no_step(
    units_s: object, steps_s: object, num_evaluated: int, age: float
) -> None:
    scenario = other(BASE, evaluate_every_steps=5) if num_evaluated else BASE
    early, late = played(scenario, units_s, steps_s, num_evaluated)
    assert early.age > 1.6
    assert late.age <= age
    assert late.steps_per_s > 0.99 * early.steps_per_s


def test_runs_with_slow_generators_are_unchanged() -> None:
    early, late = played(BASE, 8 * STEADY)
    assert late == early


@pytest.mark.parametrize("units_s", [RANDOM.lognormal(-1.8, 1.0, 1600), ONE_IN_200])
def test_where_a_slow_group_would_delay_the_learner_groups_start_early(units_s: object) -> None:
    early, late = played(BASE, units_s)
    assert late.steps_per_s > 0.98 * early.steps_per_s
    assert 1.5 < late.age <= early.age


def test_a_high_bound_is_not_used_up() -> None:
    early, late = played(other(BASE, max_staleness_versions=8, slots=128), 4 * STEADY)
    assert early.age > 7.5
    assert late.age < 4
    assert late.steps_per_s > 0.995 * early.steps_per_s


def test_a_model_that_does_not_describe_the_run_is_named_and_more_groups_in_flight_are_tried() -> (
    None
):
    assert "the learner waits 3% of the measured time" in explained(learner_waits=0.03, beside=0.0)
    found = explained(learner_waits=0.65, beside=0.05)
    assert "measured time" not in found
    assert "generation.max_concurrent_groups=8" in found


def explained(**fields: float) -> str:
    """A run whose learner waits for four groups of 1.9 s at a time."""
    recorded = Recorded(
        train=(Work(units=1.6, scoring_s=0.02),) * 160,
        evaluation=(),
        step_s=(2.5,),
        push_s=0.05,
        num_generators=1,
        num_warm=8,
        steps_per_s=0.13,
        **fields,  # type: ignore[arg-type]
    )
    scenario = other(BASE, slots=4, num_steps=40, group_size=1)
    profile = Profile(origin="run", recorded=recorded, scenario=scenario)
    return "\n".join(sentences(profile))
