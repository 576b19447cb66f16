"""Which groups may start, and how late."""

import asyncio
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from buffer_support import Clock, ask, commit, make_config, opened, put, put_all, taken_ids, tickets

from async_rl.buffer.admission import Admission
from async_rl.buffer.groups import StoredGroup
from async_rl.buffer.leases import Pace
from async_rl.buffer.replay import Replay
from async_rl.config.base import replace
from async_rl.core.types import NO_VERSION


@pytest.mark.parametrize(
    ("ahead", "learner_version", "generator_version", "refusal"),
    [
        (0, 0, 0, ""),
        (3, 0, 0, ""),
        # Would be trained on version 2 with tokens of version 0.
        (4, 6, 6, "4 groups are active, the limit is (max_staleness + 1) x groups_per_step = 4"),
        (1, 1, 0, ""),  # trained on version 1
        (2, 1, 0, "needs weights of version 1 or later, the generator has 0"),
        (0, 2, 0, "needs weights of version 1 or later"),
        (0, 2, 1, ""),
        (3, 2, 2, ""),
        (0, 2, 7, "weights of version 7, which were discarded when the learner returned to 2"),
        (0, 0, NO_VERSION, "no weights"),
        (3, 99, 99, "all groups up to the last step (100)"),
    ],
)
def test_gate_admits_exactly_what_is_within_the_bound_when_trained_in_turn(
    ahead: int, learner_version: int, generator_version: int, refusal: str
) -> None:
    config = make_config(num_steps=100)
    desk = Admission(config, Replay(config, learner_version=learner_version))
    found = desk.gate(ahead, generator_version, 0.0)
    assert refusal in found
    assert bool(refusal) == bool(found)


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
        # A slow batch counts if waiting for its like would cost too much: in 20 s the learner may
        # wait for 0.1 s.
        ([0.25] * 10 + [0.3] + [0.25] * 9, [20.75, math.inf]),
        ([0.25] * 10 + [0.75] + [0.25] * 9, [20.25, math.inf]),
        # It is forgotten after 32 steps.
        ([0.75] + [0.25] * 32, [33.75, math.inf]),
    ],
)
def test_a_group_starts_as_late_as_the_recent_batches_allow(
    made_s: list[float], expected: list[float]
) -> None:
    assert opens(played(made_s)) == expected


def test_a_batch_that_the_learner_waited_for_starts_earlier_the_next_time() -> None:
    pace = played([0.25] * 8)
    pace.commit(9, START_S + 9, has_next=False)
    # It waits too long for a slow group, and gets another one: 0.5 % of 32 steps.
    assert opens(pace) == pytest.approx([9.16, 9.16])
    # It started late and took longer than its lead.
    pace.lease(9, batch(START_S + 8.875, START_S + 9.25), START_S + 9.25)
    assert opens(pace) == [9.25 + 0.75, math.inf], "it has begun its step"
    pace.commit(10, START_S + 10.25, has_next=True)
    assert opens(pace)[0] == 11.25 - 0.5


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


async def test_a_request_that_is_held_back_is_answered_when_the_learner_needs_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After eight steps of 1 s, for whose end their next batch is made in 0.25 s."""
    clock = Clock()
    config = make_config()
    config = replace(config, evaluation=replace(config.evaluation, every_steps=0))
    async with opened(tmp_path, config, clock=clock) as service:
        await put_all(service)
        taken = await taken_ids(service, 0)
        for version in range(8):
            clock.now += 0.75
            given = await tickets(service, version)
            clock.now += 0.25
            for ticket in given:
                await put(service, ticket)
            following = await taken_ids(service, version + 1)
            await commit(service, version + 1, taken)
            taken = following
        planned: list[tuple[float, Any]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda *timer: planned.append(timer) or Mock())
        parked = service.parked.add(ask(8), [])
        service.parked.serve()
        assert parked.tickets == []
        reason = "the next group would be ready before step 10"
        assert service.waits_for() == f"admission: {reason}"
        [(delay_s, wake)] = planned
        assert delay_s == 0.75
        clock.now += delay_s
        wake()
        assert [ticket.admitted_version for ticket in parked.tickets] == [8, 8]


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
