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


def test_the_quickest_factor_that_does_not_collapse_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor that never reaches the goal loses to any that does."""
    monkeypatch.setattr(staleness_results, "RESULTS", tmp_path)
    curves = {
        0.25: [0.3, 0.5, 0.7, 0.79, 0.79],
        0.5: [0.3, 0.5, 0.7, 0.95, 0.95],
        1.0: [0.3, 0.6, 0.85, 0.85, 0.82],
        2.0: [0.3, 0.9, 0.9, 0.1, 0.1],
    }
    for factor, curve in curves.items():
        cell = Cell(
            method="vcpo",
            age=staleness_results.TUNING_AGE,
            seed=staleness_results.TUNING_SEED,
            factor=factor,
        )
        cell.recorded.write(rows(curve))
    assert staleness_results.best_factor("vcpo") == 1.0


def keep(method: str, age: int, seed: int, factor: float, curve: Sequence[float]) -> None:
    cell = Cell(method=method, age=age, seed=seed, factor=factor)
    cell.recorded.write(rows(curve))


def test_the_league_has_a_line_per_method_and_a_column_per_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_results, "RESULTS", tmp_path)
    monkeypatch.setattr(staleness_results, "COST", tmp_path / "cost.json")
    staleness_results.COST.write_text('{"vcpo": 0.25}')
    keep("vcpo", 8, 0, 1.0, [0.3, 0.9, 0.9])
    keep("vcpo", 8, 7, 1.0, [0.3, 0.7, 0.7])
    keep("vcpo", 64, 0, 1.0, [0.3, 0.9, 0.1, 0.1])
    keep("vcpo", 16, 0, 1.0, [0.3, 0.8, 0.8])
    assert staleness_results.table().splitlines()[2:] == [
        "| vcpo x1 |  |  | 0.05 (1 of 2) | 0.06 | 0.05 | 4 | 1 of 4 | 0.25 | 0.2 |"
    ]
    assert staleness_results.ends_table().splitlines()[2:] == [
        "| vcpo x1 |  |  | 0.80 +- 0.14 | 0.80 | 0.10 | 0 of 1 | 0.98 | 1 of 1 | 0.97 |"
    ]


def test_grpo_is_shown_as_it_is_launched_and_as_it_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_results, "RESULTS", tmp_path)
    keep("grpo", 16, staleness_results.TUNING_SEED, 0.25, [0.3, 0.9, 0.9])
    for factor in (0.25, 1.0):
        keep("grpo", 0, 0, factor, [0.3, 0.9, 0.9])
    assert staleness_results.lines_of_league() == [("grpo", 1.0), ("grpo", 0.25)]


def test_a_mean_curve_keeps_runs_that_have_ended() -> None:
    short, long = rows([0.2, 0.4]), rows([0.0, 0.2, 0.6])
    curve = staleness_results.mean_curve([short, long], "eval/pass_at_1")
    assert curve == pytest.approx({0: 0.1, 1: 0.3, 2: 0.5})


def test_the_rates_are_those_of_the_tuning() -> None:
    """The files may change; what a cell's factor multiplies may not."""
    assert Cell(method="vcpo", age=0, seed=0, factor=0.5).settings(1, [])[3].endswith("lr=0.0002")
    assert Cell(method="gspo", age=0, seed=0, factor=2.0).settings(1, [])[3].endswith("lr=0.0002")


def test_long_cells_show_their_end_and_how_deep_they_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_results, "RESULTS", tmp_path)
    (tmp_path / "long").mkdir()
    for seed, curve in enumerate(([0.2, 0.9, 0.4, 0.8, 0.8, 0.8, 0.8], [0.2, 0.6, 0.7])):
        cell = Cell(method="gspo+scale", age=16, seed=seed, factor=2.0, is_long=True)
        cell.recorded.write(rows(curve))
    assert staleness_results.long_table().splitlines()[2:] == [
        "| gspo+scale x2 |  |  |  |  |  |  | 0.61 +- 0.16 | 0.50, 0.00 |  |  |"
    ]


def test_a_combination_adds_to_its_file() -> None:
    settings = Cell(method="gspo+scale", age=2, seed=0, factor=2.0).settings(5, ["x=1"])
    assert settings[0] == "algorithm=gspo"
    assert "learner.optimizer.lr=0.0002" in settings
    assert settings[-2:] == ["algorithm.step_scale=effective_sequences", "x=1"]
