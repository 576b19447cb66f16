"""The reference curves: whether they are those of the configurations that ship, and their band."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from async_rl.composition.choices import CONF_DIR
from benchmarks.learning import reference
from benchmarks.study import Recorded, recorded


def test_every_configuration_that_trains_has_a_curve() -> None:
    names = {path.stem for path in CONF_DIR.glob("*.yaml")} - {*reference.OTHERS}
    assert names == {*reference.NUM_STEPS}


@pytest.mark.parametrize("name", list(recorded(reference.FILE)))
def test_a_curve_was_made_with_the_settings_of_today(name: str) -> None:
    """Otherwise delete its line and run `python -m benchmarks.learning.reference run`."""
    made, *rows = Recorded(reference.FILE, name).rows()
    conf = name.split()[0]
    assert reference.differences(made["settings"], reference.learning_settings(conf)) == []
    assert [row["step"] for row in rows] == list(
        range(0, reference.NUM_STEPS[conf] + 1, reference.EVERY)
    )


def test_curves_of_different_settings_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "reference.jsonl")
    row = {"step": 0, "eval/pass_at_1": 0.25}
    for seed, lr in enumerate((1e-4, 1e-4, 2e-4)):
        made = {"settings": {"learner.optimizer.lr": lr}}
        Recorded(reference.FILE, f"real {seed}").write([made, row])
        if seed < 2:
            assert reference.curves("real") == {0: [0.25] * (seed + 1)}
    with pytest.raises(ValueError, match=r"real 2 .*learner\.optimizer\.lr"):
        reference.curves("real")


@pytest.mark.parametrize("number", [3, 5])
def test_of_further_runs_99_percent_lie_inside_the_band(number: int) -> None:
    draw = random.Random(number)
    inside = 0
    for _ in range(4000):
        *rates, further = [draw.gauss(0.8, 0.02) for _ in range(number + 1)]
        inside += abs(further - sum(rates) / number) <= reference.half_width(rates)
    assert inside / 4000 == pytest.approx(0.99, abs=0.005)
