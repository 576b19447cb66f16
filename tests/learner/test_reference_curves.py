"""The reference curves: whether they are those of the configurations that ship, and their band."""

import random

import pytest

from async_rl.composition.schema import CONF_DIR
from benchmarks.learning import reference
from benchmarks.study import flat


def test_every_configuration_that_trains_has_a_curve() -> None:
    names = {path.stem for path in CONF_DIR.glob("*.yaml")} - {*reference.OTHERS}
    assert names == {*reference.NUM_STEPS}


@pytest.mark.parametrize(("conf", "seed"), reference.made())
def test_a_curve_was_made_with_the_settings_of_today(conf: str, seed: int) -> None:
    """Otherwise delete its line and run `python -m benchmarks.learning.reference run`."""
    run = reference.place(conf, seed)
    today = flat(reference.config_of(conf, seed).model_dump(mode="json"))
    for setting in filter(reference.decides_learning, {*today, *run.config()}):
        assert today.get(setting) == run.config().get(setting), setting
    assert [row["step"] for row in run.rows()] == list(
        range(0, reference.NUM_STEPS[conf] + 1, reference.EVERY)
    )


@pytest.mark.parametrize("number", [3, 5])
def test_of_further_runs_99_percent_lie_inside_the_band(number: int) -> None:
    draw = random.Random(number)
    inside = 0
    for _ in range(4000):
        *rates, further = [draw.gauss(0.8, 0.02) for _ in range(number + 1)]
        inside += abs(further - sum(rates) / number) <= reference.half_width(rates)
    assert inside / 4000 == pytest.approx(0.99, abs=0.005)
