from dataclasses import replace
from typing import Any

import pytest
from buffer_support import make_config

from async_rl.buffer.changes import Trained
from async_rl.buffer.groups import OpenGroup, StoredGroup, Take
from async_rl.buffer.replay import Replay
from async_rl.core.errors import ProtocolError, StalenessError
from async_rl.core.types import GroupState, Purpose


def replay(*, version: int = 0, **settings: Any) -> Replay:
    return Replay(make_config(**settings), learner_version=version)


def unfinished(group_id: int, version: int) -> OpenGroup:
    return OpenGroup(
        group_id=group_id,
        purpose=Purpose.TRAIN,
        index=group_id,
        state=GroupState.GENERATING,
        version=version,
    )


def put(buffer: Replay, *group_ids: int, oldest: int = 0, newest: int | None = None) -> None:
    newest = oldest if newest is None else newest
    for group_id in group_ids:
        buffer.put(StoredGroup(group_id=group_id, oldest_version=oldest, newest_version=newest))


def take(buffer: Replay, version: int, *open_groups: OpenGroup) -> Take:
    return buffer.take(version, open_groups, now_s=0.0)


def test_oldest_admission_is_taken_first_whatever_finished_first_and_in_turn() -> None:
    buffer = replay()
    with pytest.raises(ProtocolError, match="SyncVersion"):
        take(buffer, 1)
    put(buffer, 5)
    assert take(buffer, 0).waits_for == "1 of 2 groups are ready for step 1"
    put(buffer, 3, 9, 4)
    assert take(buffer, 0).group_ids == (3, 4)
    assert take(buffer, 1).group_ids == (5, 9)


def test_a_group_that_comes_too_late_is_dropped_by_the_next_attempt_for_the_same_version() -> None:
    buffer = replay(version=5)
    put(buffer, 0, oldest=5)
    assert take(buffer, 5).dropped == ()
    put(buffer, 1, oldest=3)
    assert take(buffer, 5).dropped == (1,)
    put(buffer, 2, oldest=4)
    assert take(buffer, 5).group_ids == (0, 2)
    # Young enough for one batch, they are compared again for the next.
    buffer = replay(max_staleness=0)
    put(buffer, 0, 1, 2, 3)
    take(buffer, 0)
    assert take(buffer, 1).dropped == (2, 3)


@pytest.mark.proves("buffer.age_rule")
@pytest.mark.parametrize(("age_rule", "dropped"), [("drop", (0, 1)), ("mask", (1,))])
def test_a_group_with_an_old_token_is_dropped_or_kept_as_long_as_another_one_is_young_enough(
    age_rule: str, dropped: tuple[int, ...]
) -> None:
    buffer = replay(version=5, age_rule=age_rule)
    put(buffer, 0, oldest=1, newest=4)
    put(buffer, 1, oldest=1, newest=3)
    put(buffer, 2, 3, oldest=5)
    taken = take(buffer, 5)
    assert (taken.dropped, taken.group_ids) == (dropped, (2, 3) if 0 in dropped else (0, 2))


def test_a_younger_group_overtakes_only_if_the_older_one_is_still_young_enough_next_time() -> None:
    buffer = replay(version=1)
    put(buffer, 1, 2, oldest=1)
    assert "group 0" in take(buffer, 1, unfinished(0, 0)).waits_for
    # A group that waits for its next attempt starts with the newest weights.
    waiting = replace(unfinished(0, 0), state=GroupState.ISSUED)
    assert take(buffer, 1, waiting).group_ids == (1, 2)
    put(buffer, 3, 4, oldest=1)
    assert take(buffer, 2, unfinished(0, 2)).group_ids == (3, 4)
    # As many are overtaken as the following batches can train, younger ones hold up nothing.
    buffer = replay(version=1)
    put(buffer, 3, 4, oldest=1)
    three = [unfinished(group_id, 1) for group_id in (0, 1, 2)]
    assert "group 2" in take(buffer, 1, *three).waits_for
    assert take(buffer, 1, *three[:2], unfinished(5, 0)).group_ids == (3, 4)


@pytest.mark.parametrize(
    ("version", "group_ids"), [(2, [0, 1]), (1, [0]), (1, [0, 2]), (1, [0, 1, 1])]
)
def test_a_commit_of_another_batch_is_refused(version: int, group_ids: list[int]) -> None:
    buffer = replay()
    put(buffer, 0, 1)
    take(buffer, 0)
    with pytest.raises(ProtocolError):
        buffer.commit(version, group_ids, now_s=0.0)


def test_a_step_over_the_bound_is_never_committed() -> None:
    buffer = replay(version=3)
    buffer.leases[3] = tuple(
        StoredGroup(group_id=i, oldest_version=1, newest_version=3, planned=3) for i in (0, 1)
    )
    with pytest.raises(StalenessError, match=r"\[0, 1\]"):
        buffer.commit(4, [0, 1], now_s=0.0)


def test_undone_steps_are_trained_again_with_the_same_groups_before_anything_else() -> None:
    buffer = replay(version=3)
    put(buffer, 0, oldest=3)
    undone = [
        StoredGroup(group_id=i, oldest_version=v, newest_version=v, planned=v)
        for i, v in ((7, 1), (8, 1), (4, 2), (9, 2))
    ]
    buffer.sync(1, undone)
    assert take(buffer, 1).group_ids == (7, 8)
    assert take(buffer, 2).group_ids == (4, 9)
    with pytest.raises(ProtocolError, match="one run"):
        replay().sync(4, [])


@pytest.mark.proves("buffer.uses_per_group")
@pytest.mark.parametrize(
    ("uses", "reused"),
    [
        (1, [(), (), (), ()]),
        (2, [(), (0, 1), (2, 3), (4, 5)]),
        # The first groups are 3 versions old at the last step, above the bound.
        (4, [(), (0, 1), (0, 1, 2, 3), (2, 3, 4, 5)]),
    ],
)
def test_a_group_is_trained_in_as_many_steps_as_it_may_be_used_within_the_bound(
    uses: int, reused: list[tuple[int, ...]]
) -> None:
    buffer = replay(uses=uses, max_staleness=2)
    for step, again in enumerate(reused):
        put(buffer, 2 * step, 2 * step + 1, oldest=step)
        # The batch of the next step is leased while the last one is trained.
        taken = take(buffer, step)
        assert (taken.group_ids, taken.reused) == ((2 * step, 2 * step + 1), again)
        assert take(buffer, step) == taken
        buffer.check_leased(step, again)
        if step > 0:
            earlier = (2 * step - 2, 2 * step - 1)
            ended = buffer.commit(step, [*earlier, *reused[step - 1]], now_s=0.0)
            assert ended == Trained(version=step, group_ids=earlier, reused=reused[step - 1])


def with_a_reused_batch() -> Replay:
    """Return a buffer that has leased the groups 2 and 3, and 0 and 1 once more, for version 1."""
    buffer = replay(uses=2, max_staleness=2)
    put(buffer, 0, 1)
    take(buffer, 0)
    buffer.commit(1, [0, 1], now_s=0.0)
    put(buffer, 2, 3, oldest=1)
    take(buffer, 1)
    return buffer


def test_a_learner_that_is_one_commit_ahead_has_used_the_groups_of_its_batch() -> None:
    buffer = with_a_reused_batch()
    # The store has no step from version 1 on.
    assert buffer.sync(2, []) == ([Trained(version=2, group_ids=(2, 3), reused=(0, 1))], ())


@pytest.mark.proves("buffer.age_rule")
def test_an_exact_age_waits_for_the_groups_of_the_steps_in_between() -> None:
    buffer = replay(max_staleness=2, age_rule="exact", num_steps=4)
    put(buffer, *range(5))
    assert take(buffer, 0).waits_for == "5 of 6 groups are ready for step 1"
    put(buffer, 5)
    assert take(buffer, 0).group_ids == (0, 1)
    assert take(buffer, 1).waits_for == "4 of 6 groups are ready for step 2"
    put(buffer, 6, 7, oldest=1)
    assert take(buffer, 1).group_ids == (2, 3)
    # The last steps have fewer after them: nothing is generated beyond the end of the run.
    assert take(buffer, 2).group_ids == (4, 5)
    assert take(buffer, 3).group_ids == (6, 7)
