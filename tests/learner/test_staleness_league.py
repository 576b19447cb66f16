"""The league reads real runs as its page says, and repeats no cell that has a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import staleness, staleness_results
from benchmarks.learning.staleness_results import Cell


def rows(rates: Sequence[float], *, age: int = 2) -> list[dict[str, Any]]:
    """A run that is evaluated at every step."""
    return [
        {
            "step": step,
            "samples": 64 * step,
            "eval/pass_at_1": rate,
            **(
                {
                    "policy/effective_sequences": 1 - step / 100,
                    "staleness/max_versions": min(age, step - 1),
                    "staleness/mean_versions": float(min(age, step - 1)),
                }
                if step
                else {}
            ),
        }
        for step, rate in enumerate(rates)
    ]


def test_a_run_is_read_in_samples_and_its_end() -> None:
    found = staleness_results.result(rows([0.3, 0.6, 0.9, 0.79, 0.85]))
    assert found.samples == pytest.approx((1 + 2 / 3) * 64)
    assert found.final == pytest.approx(0.82)
    assert not found.is_collapsed
    assert found.effective_sequences == pytest.approx((0.97 + 0.96) / 2)


def test_a_run_that_falls_far_from_its_best_has_collapsed() -> None:
    found = staleness_results.result(rows([0.3, 0.7, 0.3, 0.1]))
    assert found.samples is None
    assert found.is_collapsed


def test_a_step_of_another_age_is_found() -> None:
    run = rows([0.3] * 6)
    assert staleness.inexact(run, 2) == []
    assert staleness.inexact(run, 3) == [4, 5]
    run[4]["staleness/mean_versions"] = 1.5
    assert staleness.inexact(run, 2) == [4]


def test_a_cell_with_a_file_is_not_repeated_and_the_best_factor_of_the_tuning_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_results, "RESULTS", tmp_path)
    launched = []

    def launch(cell: Cell) -> list[dict[str, Any]]:
        launched.append(cell)
        return rows([0.3, cell.factor / 2])

    tuning = [
        Cell(
            method="vcpo",
            age=staleness_results.TUNING_AGE,
            seed=staleness_results.TUNING_SEED,
            factor=factor,
        )
        for factor in (0.5, 1.0)
    ]
    assert staleness_results.best_factor("vcpo") == 1.0
    staleness.finish(tuning[:1], launch, limit_s=60)
    assert staleness_results.best_factor("vcpo") == 0.5
    staleness.finish(tuning, launch, limit_s=60)
    assert launched == tuning
    assert staleness_results.best_factor("vcpo") == 1.0
    staleness.finish([Cell(method="vcpo", age=2, seed=0, factor=1.0)], launch, limit_s=-1)
    assert launched == tuning
    stored = tuning[0].recorded.rows()[-1]
    assert stored["eval/pass_at_1"] == 0.25


def test_the_rates_are_those_of_the_tuning() -> None:
    """The files may change; what a cell's factor multiplies may not."""
    assert Cell(method="vcpo", age=0, seed=0, factor=0.5).settings(1, [])[3].endswith("lr=0.0002")
    assert Cell(method="gspo", age=0, seed=0, factor=2.0).settings(1, [])[3].endswith("lr=0.0002")


def test_a_combination_adds_to_its_file() -> None:
    settings = Cell(method="gspo+scale", age=2, seed=0, factor=2.0).settings(5, ["x=1"])
    assert settings[0] == "algorithm=gspo"
    assert "learner.optimizer.lr=0.0002" in settings
    assert settings[-2:] == ["algorithm.step_scale=effective_sequences", "x=1"]
