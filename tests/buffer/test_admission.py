from __future__ import annotations

from typing import Any

import pytest
from buffer_support import make_config

from async_rl.buffer.admission import Admission
from async_rl.buffer.groups import OpenGroup, StoredGroup
from async_rl.buffer.replay import Replay
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
