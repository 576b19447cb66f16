from __future__ import annotations

import re

from async_rl.observability.catalogue import FIRST_SCREEN, METRICS, describe


def test_every_metric_has_a_unit_a_meaning_and_a_readable_name() -> None:
    for name, spec in METRICS.items():
        assert spec.unit, name
        assert len(spec.meaning.split()) >= 2, name
        assert re.fullmatch(r"[a-z_]+(/[a-z0-9_<>]+)+", name)


def test_ten_charts_are_on_the_first_screen_and_each_shows_declared_scalars() -> None:
    assert len(FIRST_SCREEN) == 10
    for chart in FIRST_SCREEN.values():
        for name in chart.metrics:
            spec = describe(name)
            assert spec is not None
            assert spec.unit != "text"


def test_a_placeholder_stands_for_exactly_one_path_element() -> None:
    assert describe("failures/over_age") is METRICS["failures/<reason>"]
    assert describe("memory/generators_mb_max") is METRICS["memory/<pool>_mb_max"]
    assert describe("stage_s/learner/training") is METRICS["stage_s/<role>/<stage>"]
    assert describe("failures/over/age") is None
    assert describe("failures/") is None
    assert describe("nothing/like_this") is None
    assert describe("failures/<reason>") is None
