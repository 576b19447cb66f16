"""Scoring with a limited number of places, in the forecast and in what is read from a recording."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from composing import compose_unchecked
from test_forecast import BASE, group_times, other, profile, rate, recorded

from async_rl.buffer.store.times import GroupTimes
from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.reports import predict, sentences
from async_rl.runs.forecast.scenario import changed_works, with_values
from async_rl.runs.forecast.scoring import alone_s, read_scoring
from async_rl.runs.forecast.simulation import simulate

JUDGED = other(BASE, places=4)


def judged(*, scoring_s: float = 1.0, units: float = 0.1) -> Recorded:
    """Groups of four samples, each scored for this time; the last token of all is at the end."""
    work = Work(units=units, scoring_s=scoring_s, lengths=(9,) * 4, scores=(scoring_s,) * 4)
    return replace(recorded(units=units, step_s=0.01), train=(work,) * 160, evaluation=())


def test_places_of_the_scorer_decide_how_many_samples_are_scored_at_once() -> None:
    """16 samples of a step at 1 s each: 4 s with four places, 2 s with two verifiers of four."""
    assert rate(JUDGED, judged()) == pytest.approx(1 / 4, rel=0.02)
    assert rate(other(JUDGED, places=1), judged()) == pytest.approx(1 / 16, rel=0.02)
    assert rate(other(JUDGED, verifiers=2), judged()) == pytest.approx(1 / 2, rel=0.02)
    assert rate(replace(JUDGED, chosen={"scoring_speed": 2}), judged()) == pytest.approx(
        1 / 2, rel=0.02
    )
    assert rate(other(JUDGED, places=1000), judged()) > 2.5


def test_evaluations_take_places_of_the_scorer() -> None:
    work = Work(units=0.1, scoring_s=1.0, lengths=(9,), scores=(1.0,))
    times = replace(judged(), evaluation=(work,), num_eval_groups=10)
    often = other(JUDGED, evaluate_every_steps=8)
    # 10 more seconds of one place per evaluation, in 8 steps of 16 s.
    assert rate(often, times) == pytest.approx(8 / (32 + 10 / 4), rel=0.03)


def queue(num_places: int, gaps: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The moments at which samples were written and scored, in order of arrival."""
    written, free, scored = np.cumsum(gaps), [0.0] * num_places, []
    for at_s, own_s in zip(written, seconds, strict=True):
        scored.append(max(at_s, heapq.heappop(free)) + own_s)
        heapq.heappush(free, scored[-1])
    return written, np.array(scored)


def test_waiting_for_a_place_is_no_time_of_scoring() -> None:
    num_places = 3
    random = np.random.default_rng(num_places)
    seconds = random.uniform(0.5, 1.5, 600)
    written, scored = queue(num_places, random.exponential(1.25 / num_places, 600), seconds)
    assert np.mean(scored - written) > 1.3 * np.mean(seconds)
    assert alone_s(written, scored, num_places) == pytest.approx(seconds)


def test_explain_names_a_scorer_that_limits_and_more_verifiers() -> None:
    slow = replace(profile(judged()), scenario=JUDGED)
    assert "wait" in (text := " ".join(sentences(slow)))
    assert "s for one of the 4 places of scoring" in text
    cases = [change.case for change in predict(slow)[1]]
    assert {"verifiers.count": 2} in cases
    assert {"scoring_speed": 2} in cases
    quick = replace(slow, recorded=judged(scoring_s=0.01, units=1.0))
    assert "places of scoring" not in " ".join(sentences(quick))


def test_a_forecast_changes_the_setting_by_which_this_run_scores() -> None:
    cells = replace(profile(judged()), scenario=JUDGED)
    wider = with_values(cells, {"verifiers.cells": 8, "verifiers.count": 3})
    assert (wider.config.verifiers.cells, wider.config.verifiers.count) == (8, 3)
    with pytest.raises(ConfigError, match="as this run scores by"):
        with_values(cells, {"reward.concurrency": 8})


def scored_groups(num_places: int, own_s: float) -> list[GroupTimes]:
    """Groups of four samples, written at the same time, that wait for places."""
    random = np.random.default_rng(7)
    gaps = random.exponential(6.0 * own_s / num_places, 150)
    moments, _ = queue(1, gaps, gaps * 0)
    written, scored = queue(
        num_places, np.diff(np.repeat(moments, 4), prepend=0), random.uniform(0.9, 1.1, 600) * own_s
    )
    waits = (scored - written).reshape(-1, 4)
    groups = [group_times(at_s - 1.0, 1.0, [9] * 4) for at_s in moments]
    samples = [
        np.stack([[9.0] * 4, [0.1] * 4, [1.0] * 4, 1.0 + own], axis=1).astype(np.float32)
        for own in waits
    ]
    return [g._replace(samples=own) for g, own in zip(groups, samples, strict=True)]


@pytest.mark.parametrize(
    ("settings", "num_places", "own_s", "per_unit"),
    [
        (("verifiers.cells=2", "verifiers.count=2"), 4, 0.1, 1),
        # Programs longer than 0.5 s leave their cells for spare ones, as many again.
        (("verifiers.cells=2",), 4, 0.8, 2),
        (("reward.concurrency=2", "reward.terms.mine=a:b"), 2, 0.8, 1),
    ],
)
def test_the_seconds_of_each_sample_without_waiting_are_read_with_the_places(
    settings: tuple[str, ...], num_places: int, own_s: float, per_unit: int
) -> None:
    config = compose_unchecked("grpo_code", settings)
    groups = scored_groups(num_places, own_s)
    waits = np.concatenate([group.samples[:, 3] - 1.0 for group in groups])
    assert waits.mean() > 1.3 * own_s
    seconds, places_per_unit = read_scoring(groups, config)
    assert places_per_unit == per_unit
    assert np.concatenate(seconds) == pytest.approx(own_s, rel=0.12)
    assert [len(own) for own in seconds] == [4] * 150


def test_a_group_is_complete_with_its_last_score() -> None:
    """Three samples, written at 1, 2 and 4 s with two places: scored at 9, 3 and 5 s."""
    work = Work(units=4.0, scoring_s=1.0, lengths=(1, 2, 4), scores=(8.0, 1.0, 1.0))
    times = replace(judged(), train=(work,) * 160, step_s=(1.0,) * 40)
    alone = other(JUDGED, places=2, groups_per_step=1, slots=1, max_staleness_versions=0)
    assert rate(alone, times) == pytest.approx(1 / 10)


def test_larger_groups_are_scored_as_the_next_ones() -> None:
    works = [Work(units=1.0, scoring_s=2.0, lengths=(9, 9), scores=(s, s)) for s in (1.0, 2.0)]
    times = replace(judged(), train=tuple(works))
    three, _ = changed_works(times, {"generation.group_size": 3})
    assert three.scores == (1.0, 1.0, 2.0)


def test_evaluations_may_wait_for_places_that_are_enough_for_training() -> None:
    one = Work(units=0.1, scoring_s=1.0, lengths=(9,), scores=(1.0,))
    times = replace(judged(), train=(one,) * 160, evaluation=(one,), num_eval_groups=10)
    small = other(JUDGED, groups_per_step=1, max_staleness_versions=0, evaluate_every_steps=8)
    assert simulate(small, times).places == 4
    assert simulate(other(small, evaluate_every_steps=0), times).places == 0
