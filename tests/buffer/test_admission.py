from __future__ import annotations

from typing import Any

import pytest
from buffer_support import make_config

from async_rl.buffer.admission import Admission
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.buffer.replay import Replay
from async_rl.core.types import NO_VERSION, GroupState, Purpose


def admission(
    *,
    max_attempts: int = 3,
    max_staleness: int = 1,
    stored: int = 0,
    learner_version: int = 0,
    **kinds: Any,
) -> Admission:
    config = make_config(max_attempts=max_attempts, max_staleness=max_staleness, num_steps=100)
    replay = Replay(
        config,
        learner_version=learner_version,
        ready=[
            StoredGroup(group_id=-1 - i, oldest_version=0, newest_version=0) for i in range(stored)
        ],
    )
    return Admission(config, replay, **kinds)


def hand_out(desk: Admission, version: int = 0, generator: str = "g") -> OpenGroup | None:
    """The next ticket as parked requests get it: evaluation first."""
    for purpose in (Purpose.EVAL, Purpose.TRAIN):
        group = desk.hand_out(
            purpose, generator=generator, incarnation="a", version=version, now_s=0.0
        )
        if group is not None:
            return group
    return None


@pytest.mark.parametrize(
    ("ahead", "learner_version", "generator_version", "is_open"),
    [
        (0, 0, 0, True),
        (3, 0, 0, True),  # the second of the group trained on version 1: staleness 1
        (4, 0, 0, False),  # would be trained on version 2 with tokens of version 0
        (1, 1, 0, True),  # trained on version 1
        (2, 1, 0, False),  # trained on version 2
        (0, 2, 0, False),
        (0, 2, 1, True),
        (3, 2, 2, True),
        (0, 2, 7, False),  # version 7 is of a history that the learner has given up
    ],
)
def test_gate_admits_exactly_what_is_within_the_bound_when_trained_in_turn(
    ahead: int, learner_version: int, generator_version: int, is_open: bool
) -> None:
    refusal = admission(learner_version=learner_version).gate(ahead, generator_version, 0.0)
    assert (refusal == "") is is_open


def test_refusals_name_their_reason() -> None:
    assert admission(learner_version=6).gate(4, 6, 0.0) == (
        "4 groups are active, the limit is (max_staleness + 1) x groups_per_step = 4; the learner"
        " has to finish step 7"
    )
    lagging = admission(learner_version=6).gate(2, 3, 0.0)
    assert "version 6 or later, the generator has 3" in lagging
    assert "no weights" in admission().gate(0, NO_VERSION, 0.0)
    last = admission(learner_version=99).gate(3, 99, 0.0)
    assert "all groups up to the last step (100)" in last


def test_a_ticket_that_came_back_goes_out_first_with_its_id_and_the_next_attempt() -> None:
    desk = admission()
    for _ in range(3):
        hand_out(desk)
    assert desk.return_ticket(2)
    assert desk.return_ticket(1)
    again = hand_out(desk, generator="other")
    assert again is not None
    assert (again.group_id, again.attempt, again.generator, again.state) == (
        1,
        2,
        "other",
        GroupState.GENERATING,
    )
    assert desk.next_index == 3


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


def test_a_spared_attempt_does_not_count() -> None:
    desk = admission(max_attempts=1)
    hand_out(desk)
    assert desk.return_ticket(0, is_spared=True)
    hand_out(desk)
    assert not desk.return_ticket(0)
    assert not desk.open
    assert not desk.generators


def test_a_ticket_that_came_back_is_refused_to_a_generator_that_lags_too_far() -> None:
    desk = admission(max_staleness=0)
    hand_out(desk)
    desk.return_ticket(0)
    desk._replay.learner_version = 1
    assert hand_out(desk, version=0) is None
    assert hand_out(desk, version=1) is not None


def test_a_generator_ahead_of_a_restored_learner_gets_no_tickets() -> None:
    desk = admission(learner_version=4)
    group = hand_out(desk, version=4)
    assert group is not None
    desk._replay.learner_version = 2
    desk.lower_version([group.group_id], 2)
    assert hand_out(desk, version=4) is None
    assert "discarded when the learner returned to 2" in desk.refusal(4, {Purpose.TRAIN}, 0.0)
    assert desk.open[group.group_id].version == 2


def test_restored_groups_keep_their_holders_and_their_order() -> None:
    held = OpenGroup(
        group_id=0,
        purpose=Purpose.TRAIN,
        index=0,
        state=GroupState.GENERATING,
        attempt=1,
        generator="g",
        incarnation="a",
    )
    waiting = OpenGroup(group_id=1, purpose=Purpose.TRAIN, index=1, attempt=2)
    desk = admission(groups=[held, waiting], next_group_id=5, next_index=4)
    assert desk.of_generator("g") == [held]
    first, second = hand_out(desk), hand_out(desk)
    assert first is not None
    assert second is not None
    assert (first.group_id, first.attempt) == (1, 3)
    assert (second.group_id, second.index) == (5, 4)


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
    small, large = map(comparisons_of_a_group_handed_out_again, (64, 4096))
    # Searches of sorted lists: the logarithm of the size. One scan would be hundreds.
    assert large < 3 * small < 300
