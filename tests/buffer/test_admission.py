"""Which groups may start, and how late."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from buffer_support import Clock, ask, commit, make_config, opened, put, put_all, taken_ids, tickets

from async_rl.buffer.admission import Admission
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.buffer.pace import Pace
from async_rl.buffer.replay import Replay
from async_rl.config.base import replace
from async_rl.core.types import NO_VERSION, GroupState, Purpose


def admission(*, learner_version: int = 0, **settings: Any) -> Admission:
    config = make_config(num_steps=100, **settings)
    return Admission(config, Replay(config, learner_version=learner_version))


def hand_out(desk: Admission, version: int = 0, generator: str = "g") -> OpenGroup | None:
    return desk.hand_out(
        Purpose.TRAIN, generator=generator, incarnation="a", version=version, now_s=0.0
    )


@pytest.mark.parametrize(
    ("ahead", "learner_version", "generator_version", "refusal"),
    [
        (0, 0, 0, ""),
        (3, 0, 0, ""),  # the second of the group trained on version 1: staleness 1
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
    found = admission(learner_version=learner_version).gate(ahead, generator_version, 0.0)
    assert refusal in found
    assert bool(refusal) == bool(found)


@pytest.mark.parametrize(("returned", "is_open"), [(1, True), (2, False), (3, False)])
def test_the_groups_before_a_returned_one_decide_about_its_turn(
    returned: int, is_open: bool
) -> None:
    desk = admission(learner_version=1)
    free = [desk.num_free(Purpose.TRAIN, 0.0)]
    for _ in range(4):
        hand_out(desk, version=1)
        free.append(desk.num_free(Purpose.TRAIN, 0.0))
    desk.return_ticket(returned)
    assert [*free, desk.num_free(Purpose.TRAIN, 0.0)] == [4, 3, 2, 1, 0, 1]
    # Tokens of version 0 may be trained in the next step and not in the one after it.
    group = hand_out(desk, version=0)
    assert (group is not None and group.version == 0) is is_open


def test_tokens_of_discarded_weights_make_no_group_newer() -> None:
    desk = admission(learner_version=4)
    group = hand_out(desk, version=4)
    assert group is not None
    desk.lower_version([group.group_id], 2)
    assert desk.open[group.group_id].version == 2


class Counted(int):
    """A group id that counts its comparisons."""

    num = 0

    def __eq__(self, other: object) -> bool:
        Counted.num += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Counted.num += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Counted.num += 1
        return int(self) > other

    def __hash__(self) -> int:
        return hash(int(self))


def comparisons_of_a_group_handed_out_again(num_groups: int) -> float:
    """Half of the fleet is lost, one group each; a quarter of the groups is ready."""
    config = make_config(groups_per_step=num_groups, max_staleness=0)
    replay = Replay(config)
    for index in range(num_groups // 4):
        replay.put(StoredGroup(group_id=Counted(index), oldest_version=0, newest_version=0))
    groups = [
        OpenGroup(
            group_id=Counted(index),
            purpose=Purpose.TRAIN,
            index=index,
            state=GroupState.GENERATING,
            attempt=1,
            generator=f"g{index}",
            version=0,
        )
        for index in range(num_groups // 4, num_groups)
    ]
    desk = Admission(config, replay, groups=groups)
    lost = groups[: len(groups) // 2]
    Counted.num = 0
    for group in lost:
        desk.return_ticket(group.group_id)
    # Of some of them the result still arrives.
    early, late = lost[: len(lost) // 2], lost[len(lost) // 2 :]
    for group in late:
        desk.close(group.group_id)
    again = [hand_out(desk, generator="other") for _ in early]
    assert [group.group_id for group in again if group is not None] == [g.group_id for g in early]
    return Counted.num / len(lost)


def test_handing_out_again_costs_each_group_the_same_in_a_large_fleet() -> None:
    small, large = map(comparisons_of_a_group_handed_out_again, (64, 2048))
    # Searches of sorted lists: the logarithm of the size. One scan would be hundreds.
    assert large < 3 * small < 300


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
    ("issued_s", "ready_s"),
    [
        (8.75, 9.25),  # it took longer than its lead
        (9.0, 9.25),  # it started late
        (8.875, 9.25),  # both
    ],
)
def test_a_batch_that_the_learner_waited_for_would_have_come_in_time_with_the_next_lead(
    issued_s: float, ready_s: float
) -> None:
    pace = played([0.25] * 8)
    pace.commit(9, START_S + 9, has_next=False)
    # It waits too long for a slow group, and gets another one: 0.5 % of 32 steps.
    assert opens(pace) == pytest.approx([9.16, 9.16])
    pace.lease(9, batch(START_S + issued_s, START_S + ready_s), START_S + ready_s)
    assert opens(pace) == [9.25 + 0.75, math.inf], "it has begun its step"
    pace.commit(10, START_S + 10.25, has_next=True)
    assert opens(pace)[0] == 11.25 - 0.5


def test_a_step_that_ends_early_needs_its_next_batch_earlier() -> None:
    pace = played([0.25] * 8)
    pace.lease(9, batch(START_S + 8.25, START_S + 8.5), START_S + 8.5)
    pace.commit(9, START_S + 8.5, has_next=True)
    assert opens(pace)[0] == 9.5 - (0.25 + 0.5)


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
