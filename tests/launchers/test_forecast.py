"""The forecast from recorded times, against cases that can be computed by hand, and the scoring of
samples with a limited number of places.
"""

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from composing import compose_unchecked

from async_rl.buffer.store.trajectories import GroupTimes
from async_rl.config.base import by_name, with_settings
from async_rl.core.errors import ConfigError
from async_rl.runs.forecast.ranges import forecast, margin, own_run
from async_rl.runs.forecast.recorded import Recorded, Work, works_of
from async_rl.runs.forecast.reports import plan, predict, sentences, sweep
from async_rl.runs.forecast.scenario import Profile, Scenario, with_values
from async_rl.runs.forecast.scoring import read_scoring
from async_rl.runs.forecast.simulation import simulate

NAMES = (
    "generators=generators.count verifiers=verifiers.count places=verifiers.cells"
    " slots=generation.max_concurrent_groups group_size=generation.group_size"
    " groups_per_step=buffer.groups_per_step age_rule=buffer.age_rule num_steps=num_steps"
    " max_staleness_versions=buffer.max_staleness_versions"
    " push_every_steps=weights.push_every_steps evaluate_every_steps=evaluation.every_steps"
)
PATHS = by_name(NAMES.split())
WORDS = (
    "generators.count=1 verifiers.count=1 generation.max_concurrent_groups=4 num_steps=40"
    " generation.group_size=4 buffer.groups_per_step=4 buffer.max_staleness_versions=2"
    " evaluation.every_steps=0 weights.push_every_steps=1"
)
BASE = Scenario(config=compose_unchecked("grpo_code", WORDS.split()))


def other(scenario: Scenario, **values: Any) -> Scenario:
    """Return the scenario with other settings."""
    settings = {PATHS[name]: value for name, value in values.items()}
    return replace(scenario, config=with_settings(scenario.config, settings))


def recorded(
    *, units: float, step_s: float, scoring_s: float = 0.0, push_s: float = 0.0, beside: float = 0.0
) -> Recorded:
    return Recorded(
        train=(Work(units=units, scoring_s=scoring_s),) * 160,
        evaluation=(Work(units=units, scoring_s=0.0, lengths=(9,) * 4),) * 6,
        beside=beside,
        step_s=(step_s,) * 40,
        push_s=push_s,
        num_generators=1,
        num_warm=8,
        steps_per_s=1.0,
        num_eval_groups=1,
    )


def rate(scenario: Scenario, times: Recorded) -> float:
    return simulate(scenario, times).steps_per_s


def test_a_slow_learner_decides() -> None:
    forecast = simulate(BASE, recorded(units=0.1, step_s=2.0))
    assert forecast.steps_per_s == pytest.approx(0.5, rel=1e-6)
    assert forecast.learner_waits < 0.01
    assert forecast.generators_idle > 0.8
    assert forecast.age < 1.1


@pytest.mark.parametrize(("beside", "seconds"), [(0.0, 1.0), (0.5, 2.5)])
def test_slow_generation_decides_by_how_groups_share_an_engine(
    beside: float, seconds: float
) -> None:
    """Four groups in flight take 1 + 3 x beside seconds together."""
    times = recorded(units=1.0, step_s=0.01, beside=beside)
    assert rate(BASE, times) == pytest.approx(1 / seconds, rel=0.02)
    assert simulate(BASE, times).learner_waits > 0.9


def test_without_staleness_the_stages_alternate() -> None:
    times = recorded(units=1.0, step_s=0.5, scoring_s=0.25, push_s=0.25)
    synchronous = other(BASE, max_staleness_versions=0)
    assert rate(synchronous, times) == pytest.approx(1 / 2.0, rel=1e-6)
    assert simulate(synchronous, times).age == 0


def test_evaluations_cost_generation() -> None:
    times = recorded(units=1.0, step_s=0.01, beside=1.0)
    times = replace(times, num_eval_groups=10)
    rates = [rate(other(BASE, evaluate_every_steps=every), times) for every in (4, 8, 0)]
    # 10 groups of an evaluation are added to the 32 or 16 of its steps, whatever the interval is.
    assert rates[0] / rates[2] == pytest.approx(16 / 26, rel=0.05)
    assert rates[1] / rates[2] == pytest.approx(32 / 42, rel=0.05)


def test_the_slowdown_is_found_where_groups_overlap_and_their_samples_end_one_by_one() -> None:
    """An engine with four groups of four, whose steps take 0.020 + 0.002 s per sample."""
    random = np.random.default_rng(1)
    now, groups, running = 0.0, [], []
    while len(groups) < 150:
        while len(running) < 4:
            left = [int(length) for length in random.integers(8, 41, 4)]
            running.append((now, left, [0.0] * 4, list(left)))
        now += 0.020 + 0.002 * sum(left > 0 for _, lefts, *_ in running for left in lefts)
        for begun, lefts, ends, lengths in list(running):
            for index, left in enumerate(lefts):
                lefts[index] = left - 1
                if left == 1:
                    ends[index] = now - begun
            if max(lefts) <= 0:
                running.remove((begun, lefts, ends, lengths))
                samples = [[n, 0.0, end, end] for n, end in zip(lengths, ends, strict=True)]
                group = group_times(begun, max(ends), lengths)
                groups.append(group._replace(samples=np.array(samples, np.float32)))
    (works, _, beside), *others = works_of(groups, [()] * len(groups))
    assert [other for *_, other in others] == pytest.approx([0.087, 0.095], abs=0.01)
    assert beside == pytest.approx(0.002 / 0.022, rel=0.03)
    per_token = [work.units / max(work.lengths) for work in works]
    assert np.mean(per_token) == pytest.approx(0.022, rel=0.02)


def test_a_sweep_reads_its_words_or_names_the_wrong_one() -> None:
    assert sweep(["generators.count=4..1,7", "buffer.max_staleness_versions=0"]) == {
        "generators.count": [1, 2, 3, 4, 7],
        "buffer.max_staleness_versions": [0],
    }
    for word, reason in (
        ("generator.count=1", "did you mean generators.count"),
        ("generators.count=0", "'0' is not a whole number >= 1"),
        ("generators.count=1..401", "401 combinations"),
    ):
        with pytest.raises(ConfigError, match=reason):
            sweep([word])


def profile(times: Recorded) -> Profile:
    return Profile(origin="run", recorded=times, scenario=BASE)


def test_a_larger_batch_takes_the_learner_longer() -> None:
    times = recorded(units=1.0, step_s=1.0)
    wider = with_values(profile(times), {"buffer.groups_per_step": 8})
    assert (wider.config.buffer.groups_per_step, wider.learner_speed) == (8, 0.5)
    # Where half of its time was seen to grow with the tokens, only that half does.
    half = profile(replace(times, by_tokens=0.5))
    assert with_values(half, {"buffer.groups_per_step": 8}).learner_speed == pytest.approx(2 / 3)
    assert with_values(half, {"learner.ranks": 3, "learner_speed": 2}).learner_speed == 6


def group_times(moment: float, duration: float, lengths: list[int]) -> GroupTimes:
    samples = [[length, 0.0, duration * length / max(lengths), duration] for length in lengths]
    return GroupTimes(
        purpose="train",
        generator="generator-0",
        handed_out_s=moment,
        generation_s=duration,
        ready_s=moment + duration + 0.5,
        num_tokens=sum(lengths),
        num_samples=len(lengths),
        samples=np.array(samples, np.float32),
    )


def test_what_the_recording_leaves_open_is_said_and_is_in_the_range() -> None:
    """Four groups at once, always: they took 1.6 s each, of an engine whose steps take 0.2 of their
    time longer for each further sample. With one at once a group takes 1 s.
    """
    groups = [group_times(1.6 * (n // 4), 1.6, [100]) for n in range(160)]
    (works, _, beside), (_, _, least), (slowest, _, most) = works_of(groups, [()] * 160)
    assert (beside, least, most) == (0.0, 0.0, 1.0)
    times = [
        replace(recorded(units=1.0, step_s=0.01, beside=each), train=tuple(own))
        for own, each in ((works, beside), (slowest, most))
    ]
    run = replace(profile(times[0]), others=times[1:])
    truth = rate(other(BASE, slots=1), recorded(units=1.0, step_s=0.01, beside=0.2))
    found = forecast(run, {"generation.max_concurrent_groups": 1}, error=0.0)
    assert found.least == pytest.approx(1 / 6.4, rel=0.02)
    assert found.least < truth == pytest.approx(0.25, rel=0.01)
    assert truth < found.most == pytest.approx(0.25 * 2.5, rel=0.02)
    (section,) = plan(run, {"generation.max_concurrent_groups": [1]}).sections
    assert any(line.startswith("not measured: by how much samples") for line in section.lines)


def test_a_run_that_the_model_does_not_describe_gains_no_more_than_its_learner_waited() -> None:
    """Four groups take 1 s on one engine and the step 0.9 s; in the run the learner waited 3 %."""
    times = recorded(units=1.0, step_s=0.9)
    times = replace(times, learner_waits=0.03, generators_idle=0.4, steps_per_s=1.08)
    run = replace(profile(times), scenario=other(BASE, group_size=1))
    own, changes = predict(run)
    assert own.learner_waits == pytest.approx(0.1, abs=0.02)
    gains = {next(iter(change.case)): change.gain for change in changes}
    assert gains.pop("generators.count") == pytest.approx(0.03 / 0.97)
    text = " ".join(sentences(run))
    assert "the learner waits 3% of the measured time and 1" in text
    assert "generators are idle 40% of the measured time and" in text
    assert margin(run, own_run(run)) == pytest.approx(0.05 + 1.08 - 1, abs=0.01)


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
