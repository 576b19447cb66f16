"""Scoring with a limited number of places, in the forecast and in what is read from a recording."""

import heapq
from dataclasses import replace

import numpy as np
import pytest
from composing import compose_unchecked
from test_forecast import BASE, group_times, other, profile, rate, recorded

from async_rl.buffer.store.trajectories import GroupTimes
from async_rl.runs.forecast.recorded import Recorded, Work
from async_rl.runs.forecast.reports import predict, sentences
from async_rl.runs.forecast.scoring import read_scoring

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
    faster = replace(JUDGED, chosen={"scoring_speed": 2})
    assert rate(faster, judged()) == pytest.approx(1 / 2, rel=0.02)
    assert rate(other(JUDGED, places=1000), judged()) > 2.5


def queue(num_places: int, gaps: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The moments at which samples were written and scored, in order of arrival."""
    written, free, scored = np.cumsum(gaps), [0.0] * num_places, []
    for at_s, own_s in zip(written, seconds, strict=True):
        scored.append(max(at_s, heapq.heappop(free)) + own_s)
        heapq.heappush(free, scored[-1])
    return written, np.array(scored)


def test_explain_names_a_scorer_that_limits_and_more_verifiers() -> None:
    slow = replace(profile(judged()), scenario=JUDGED)
    assert "wait" in (text := " ".join(sentences(slow)))
    assert "s for one of the 4 places of scoring" in text
    cases = [change.case for change in predict(slow)[1]]
    assert {"verifiers.count": 2} in cases
    assert {"scoring_speed": 2} in cases
    quick = replace(slow, recorded=judged(scoring_s=0.01, units=1.0))
    assert "places of scoring" not in " ".join(sentences(quick))


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
