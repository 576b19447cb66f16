"""Groups that start late: the rule with played times, and the requests that it holds back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from buffer_support import Clock, ask, commit, make_config, opened, put, put_all, take, tickets

from async_rl.buffer.groups import StoredGroup
from async_rl.buffer.pace import Pace
from async_rl.buffer.service import BufferService
from async_rl.config.base import replace

START_S = 64.0
NOW = -math.inf


def batch(issued_s: float, *ready_s: float) -> list[StoredGroup]:
    return [
        StoredGroup(
            group_id=index, oldest_version=0, newest_version=0, issued_s=issued_s, ready_s=at_s
        )
        for index, at_s in enumerate(ready_s)
    ]


def played(made_s: list[float], every: int = 0) -> Pace:
    """Batches that are complete just as they are needed, steps of 1 s. The step of version
    len(made_s) started at START_S + len(made_s) and is in training.
    """
    config = make_config(max_staleness=2)
    pace = Pace(replace(config, evaluation=replace(config.evaluation, every_steps=every)))
    for version, own_s in enumerate(made_s):
        now_s = START_S + version
        if version:
            pace.commit(version, now_s, has_next=False)
        pace.lease(version, batch(now_s - own_s, now_s - own_s / 2, now_s), now_s)
    pace.commit(len(made_s), START_S + len(made_s), has_next=True)
    return pace


def opens(pace: Pace) -> list[float]:
    """Seconds since START_S, of groups one and two steps after the step in training."""
    assert pace.opens_s[0] == -math.inf
    return [at_s - START_S for at_s in pace.opens_s[1:]]


@pytest.mark.parametrize(
    ("made_s", "expected"),
    [
        # One lead before the step in training is expected to end.
        ([0.25] * 8, [8.75, math.inf]),
        # Longer than a step: it starts in the step before its own.
        ([1.25] * 8, [NOW, 8.75]),
        ([2.5] * 8, [NOW, NOW]),
        # Nothing is held back before four batches were measured.
        ([0.25] * 3, [NOW, NOW]),
        ([0.25] * 4, [4.75, math.inf]),
        # A slow batch counts if waiting for its like would cost too much: in 20 s the learner may
        # wait for 0.1 s.
        ([0.25] * 10 + [0.3] + [0.25] * 9, [20.75, math.inf]),
        ([0.25] * 10 + [0.75] + [0.25] * 9, [20.25, math.inf]),
        # It is forgotten after 32 steps.
        ([0.75] + [0.25] * 31, [32.25, math.inf]),
        ([0.75] + [0.25] * 32, [33.75, math.inf]),
    ],
)
def test_a_group_starts_as_late_as_the_recent_batches_allow(
    made_s: list[float], expected: list[float]
) -> None:
    assert opens(played(made_s)) == expected


@pytest.mark.parametrize(
    ("issued_s", "ready_s", "lead_s"),
    [
        (8.75, 9.25, 0.5),  # it took longer than its lead
        (9.0, 9.25, 0.5),  # it started late
        (8.875, 9.25, 0.5),  # both
    ],
)
def test_a_batch_that_the_learner_waited_for_would_have_come_in_time_with_the_next_lead(
    issued_s: float, ready_s: float, lead_s: float
) -> None:
    pace = played([0.25] * 8)
    pace.commit(9, START_S + 9, has_next=False)
    pace.lease(9, batch(START_S + issued_s, START_S + ready_s), START_S + ready_s)
    pace.commit(10, START_S + 10.25, has_next=True)
    assert opens(pace)[0] == 11.25 - lead_s


def test_a_step_that_ends_early_needs_its_next_batch_earlier() -> None:
    pace = played([0.25] * 8)
    pace.lease(9, batch(START_S + 8.25, START_S + 8.5), START_S + 8.5)
    pace.commit(9, START_S + 8.5, has_next=True)
    assert opens(pace)[0] == 9.5 - (0.25 + 0.5)


def test_a_learner_that_waits_too_long_for_a_slow_group_gets_another_one() -> None:
    pace = played([0.25] * 8)
    pace.commit(9, START_S + 9, has_next=False)
    # 0.5 % of 32 steps.
    assert opens(pace) == pytest.approx([9.16, 9.16])
    pace.lease(9, batch(START_S + 8.75, START_S + 9.125), START_S + 9.125)
    assert opens(pace) == [9.125 + 0.75, math.inf], "it has begun its step"


def test_batches_after_an_evaluated_version_have_their_own_leads() -> None:
    # The evaluation of version 4 delays batch 5, and so on.
    pace = played([1.5 if version % 4 == 1 else 0.25 for version in range(24)], every=4)
    # Batch 25 takes 1.5 s. Batch 26 takes 0.25 s and is needed a step later.
    assert opens(pace) == [NOW, math.inf]
    pace.commit(25, START_S + 25, has_next=True)
    assert opens(pace) == [25.75, math.inf]
    for version in (26, 27):
        pace.commit(version, START_S + version, has_next=True)
    # Batch 29 starts in the step before its own, after batch 28: tickets go in order.
    assert opens(pace) == [27.5, 27.5]


def test_a_step_that_was_cut_off_and_restored_groups_measure_nothing() -> None:
    pace = played([0.25] * 8)
    pace.stop()
    # A buffer does not know the times of groups that an earlier process of it stored.
    pace.lease(8, [StoredGroup(group_id=0, oldest_version=0, newest_version=0)], 500.0)
    pace.commit(9, 501.0, has_next=True)
    assert pace.opens_s == [-math.inf, 501.75, math.inf]


class Timers:
    """An event loop whose timers run by hand."""

    def __init__(self) -> None:
        self.planned: list[tuple[float, Any]] = []

    def call_later(self, delay_s: float, callback: Any) -> Timers:
        self.planned.append((delay_s, callback))
        return self

    def cancel(self) -> None:
        self.planned.clear()


async def learner_bound(service: BufferService, clock: Clock) -> None:
    """Eight steps of 1 s, for whose end their next batch is made in 0.25 s."""
    await put_all(service)
    taken = await take(service, 0)
    for version in range(8):
        clock.now += 0.75
        given = await tickets(service, version)
        clock.now += 0.25
        for ticket in given:
            await put(service, ticket)
        group_ids = [group.group_id for group in taken.groups]
        taken = await take(service, version + 1)
        await commit(service, version + 1, group_ids)


async def test_a_request_that_is_held_back_is_answered_when_the_learner_needs_the_group(
    tmp_path: Path,
) -> None:
    clock = Clock()
    config = make_config()
    config = replace(config, evaluation=replace(config.evaluation, every_steps=0))
    async with opened(tmp_path, config, clock=clock) as service:
        await learner_bound(service, clock)
        requests = service.parked
        requests._loop = timers = Timers()  # type: ignore[assignment]
        parked = requests.add(ask(8), [])
        requests.serve()
        assert parked.tickets == []
        reason = "the next group would be ready before step 10"
        assert service.waits_for() == f"admission: {reason}"
        [(delay_s, wake)] = timers.planned
        assert delay_s == 0.75
        clock.now += delay_s
        wake()
        assert [ticket.admitted_version for ticket in parked.tickets] == [8, 8]
        assert timers.planned == []


@pytest.mark.parametrize("changed", [{"placement": "colocated"}, {"age_rule": "exact"}])
async def test_nothing_is_held_back_for_an_exact_age_or_on_a_shared_device(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    """Generators do not write while the learner trains."""
    config = make_config(age_rule=changed.get("age_rule", "drop"))
    config = replace(config, placement=changed.get("placement", config.placement))
    async with opened(tmp_path, config) as service:
        pace = service.state.replay.pace
        for version in range(8):
            pace.lease(version, batch(version + 1.0, version + 1.25), version + 2.0)
            pace.commit(version + 1, version + 2.5, has_next=True)
        assert opens(pace) == [NOW]
