"""Prompts that leave: who, how many, and from when on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from buffer_support import FakePrompts, make_config, opened, put, tickets, train
from composing import compose_unchecked
from hypothesis import given
from hypothesis import strategies as st

from async_rl.buffer.policies import ScoreFilter
from async_rl.buffer.store.ledger import reading, summary
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.data.prompt_file import PromptOrder

BASE = compose_unchecked("grpo_code")


def make_filter(num: int, *, reward: dict[str, Any] | None = None, **bounds: Any) -> ScoreFilter:
    data = replace(BASE.data, filter=replace(BASE.data.filter, **bounds))
    config: RunConfig = replace(BASE, data=data, reward=replace(BASE.reward, **(reward or {})))
    prompts: Any = SimpleNamespace(
        order=PromptOrder(0, num, shuffle=False),
        prompt=lambda _, position: SimpleNamespace(prompt_id=f"p{position}"),
    )
    return ScoreFilter(config, prompts)


def judged(rewards: list[list[float]], **settings: Any) -> list[int]:
    """Who leaves after one epoch in which prompt i got rewards[i]."""
    found = make_filter(len(rewards), **settings)
    for position, values in enumerate(rewards):
        found.note(position, values)
    return [index for left in found.before(len(rewards)) for _, index, _ in left.leavers]


REWARDS = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.8]]


@pytest.mark.covers(
    "dataset_filter_threshold", "dataset_max_filter_percentage", "dataset_filter_threshold off"
)
@pytest.mark.parametrize(
    ("settings", "leavers"),
    [
        ({"above": 0.6}, [2, 3]),  # the highest first
        ({"above": 1.0}, []),  # at the bound is not above it
        ({"below": 0.3}, [0]),
        ({"above": 0.95, "below": 0.3}, [0, 2]),
        # No more than the share, rounded down, and of all prompts the nearest to its bound stays.
        ({"above": 0.4, "max_share": 0.25}, [2]),
        ({"above": 0.4, "max_share": 0.2}, []),
        ({"above": 0.4, "below": 0.1, "max_share": 1.0}, [2, 3, 0]),
        ({}, []),
    ],
)
def test_prompts_beyond_a_bound_leave(settings: dict[str, float], leavers: list[int]) -> None:
    assert judged(REWARDS, **{"max_share": 0.9} | settings) == leavers


@pytest.mark.covers("reward_output_scaling, bias, max_reward_clip")
def test_the_reward_is_scaled_as_for_training_before_the_mean() -> None:
    assert judged(
        [[1.0, 1.0], [10.0, 0.0]], above=2.9, max_share=0.9, reward={"scale": 3.0, "clip": 5.0}
    ) == [0]
    assert judged([[1.0, 1.0], [0.5, 0.5]], below=0.4, max_share=0.9, reward={"bias": 0.5}) == [1]


def test_the_newest_group_decides_at_the_begin_of_an_epoch_and_once() -> None:
    found = make_filter(4, above=0.5, max_share=0.3)
    assert found.before(0) == []
    # In whatever order they come back.
    for position, reward in ((4, 0.0), (0, 1.0), (1, 1.0), (2, 0.9), (3, 0.9)):
        found.note(position, [reward])
    assert [found.before(k) for k in (1, 2, 3, 5)] == [[], [], [], []]
    assert [left.leavers for left in found.before(4)] == [[("p1", 1, 1.0)]]
    assert found.before(4) == [], "this epoch's decision is made"


@pytest.mark.covers("the active set survives a resume")
@given(
    n=st.integers(1, 12),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    shares=st.lists(st.floats(0.05, 0.95), max_size=5),
    data=st.data(),
)
def test_every_epoch_holds_what_is_left_once_and_another_process_finds_the_same(
    n: int, seed: int, shuffle: bool, shares: list[float], data: st.DataObject
) -> None:
    order = PromptOrder(seed, n, shuffle=shuffle)
    active, position, left, seen = set(range(n)), 0, [], []
    for share in shares:
        seen += [order.index(k) for k in range(position, position + len(active))]
        assert sorted(seen[position:]) == sorted(active)
        position += len(active)
        going = data.draw(st.permutations(sorted(active)))[: int(len(active) * share)]
        assert order.may_lose_at(position)
        if going:
            order.remove(going, position)
            left.append((position, going))
            active -= set(going)
    assert order.active.tolist() == sorted(active)
    again = PromptOrder(seed, n, shuffle=shuffle)
    again.restore(left, [])
    assert [again.index(k) for k in range(position)] == seen
    assert [again.index(k) for k in range(position, position + 30)] == [
        order.index(k) for k in range(position, position + 30)
    ]


@pytest.mark.covers("dataset filter after a resume")
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_solved_prompts_leave_also_after_a_restart(tmp_path: Path, cut: int) -> None:
    """Steps of two groups. The prompts t0 and t1 are always solved, the others never."""
    config = make_config(max_staleness=0)
    chosen = replace(config.data.filter, above=0.5, max_share=0.4)
    config = replace(config, data=replace(config.data, filter=chosen))
    issued = []
    for steps in (range(cut), range(cut, 6)):
        async with opened(tmp_path, config, FakePrompts(num_train=4)) as service:
            for version in steps:
                for ticket in await tickets(service, version):
                    prompt_id = ticket.prompt.prompt_id
                    issued.append(prompt_id)
                    await put(service, ticket, passes=prompt_id in ("t0", "t1"))
                await train(service, version)
    assert issued == ["t0", "t1", "t2", "t3", "t1", "t2", "t3", "t2", "t3", "t2", "t3", "t2"]
    with reading(tmp_path) as connection:
        assert summary(connection).num_left == 2
