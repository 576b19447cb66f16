"""Played runs whose groups start as early as the age allows, or as late as the learner needs."""

from dataclasses import replace

import numpy as np
import pytest
import test_forecast
from test_forecast import other

from async_rl.config.base import with_settings
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.scenario import Scenario
from async_rl.runs.forecast.simulation import Forecast, simulate

NUM_STEPS = 200
BASE = other(test_forecast.BASE, slots=32, groups_per_step=16, num_steps=NUM_STEPS)
RANDOM = np.random.default_rng(0)
STEADY = np.full(1600, 0.2)
HALF_LEAVES = np.where(np.arange(1600) < 800, 0.2, 0.4)


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


UNEVEN = np.where(np.arange(NUM_STEPS) == 99, 60.0, RANDOM.lognormal(0, 0.2, NUM_STEPS))


@pytest.mark.parametrize(
    ("units_s", "steps_s", "num_evaluated", "age"),
    [
        # 32 of the next 100 steps until the change is forgotten.
        pytest.param(HALF_LEAVES, (1.0,), 0, 1.4, id="half of the fleet leaves"),
        pytest.param(STEADY, UNEVEN, 0, 1.1, id="uneven steps and a stall"),
        pytest.param(STEADY, (1.0,), 64, 1.25, id="evaluations"),
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


def test_where_a_slow_group_would_delay_the_learner_groups_start_early() -> None:
    early, late = played(BASE, RANDOM.lognormal(-1.8, 1.0, 1600))
    assert late.steps_per_s > 0.98 * early.steps_per_s
    assert 1.5 < late.age <= early.age
