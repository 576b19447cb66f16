"""The reference curves: whether they are those of the configurations that ship, and their band."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from async_rl.composition.choices import CONF_DIR
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


def test_curves_of_different_settings_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "reference.jsonl")
    config = reference.config_of("grpo_code", 0)
    optimizer = config.learner.optimizer.model_copy(update={"lr": 1e-3})
    other = config.learner.model_copy(update={"optimizer": optimizer})
    changed = config.model_copy(update={"learner": other})
    for seed, made in enumerate((config, config, changed)):
        reference.place("grpo_code", seed).write([{"step": 0, "eval/pass_at_1": 0.25}], config=made)
        if seed < 2:
            assert reference.curves("grpo_code") == {0: [0.25] * (seed + 1)}
    with pytest.raises(SystemExit, match=r"grpo_code-seed2 with 0\.001"):
        reference.curves("grpo_code")


@pytest.mark.parametrize("number", [3, 5])
def test_of_further_runs_99_percent_lie_inside_the_band(number: int) -> None:
    draw = random.Random(number)
    inside = 0
    for _ in range(4000):
        *rates, further = [draw.gauss(0.8, 0.02) for _ in range(number + 1)]
        inside += abs(further - sum(rates) / number) <= reference.half_width(rates)
    assert inside / 4000 == pytest.approx(0.99, abs=0.005)
