"""The reference curves are those of the configurations that ship."""

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
