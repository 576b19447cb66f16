"""Prompts by their results: what the policies choose, who leaves and from when on, and that a
restarted buffer decides the same.
"""

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_support import FakePrompts, make_config, opened, put, put_passes, tickets, train
from composing import compose_unchecked
from hypothesis import given
from hypothesis import strategies as st

from async_rl.buffer.policies import Choice, Result, ScoreFilter, pools, priority
from async_rl.buffer.store.ledger import reading, summary
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.types import Prompt, Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, PromptOrder, open_prompts
from async_rl.data.prompts import write_prompts
from async_rl.runs.forecast.selection import selection_gain

COUNT = 12


def selecting(order: str, groups_per_step: int = 4) -> RunConfig:
    config = make_config(groups_per_step=groups_per_step, max_staleness=0)
    return replace(config, data=replace(config.data, order=order))


def last_rows(choice: Choice) -> list[int]:
    return list(choice.candidates[-choice.count :])


def other_rows(choice: Choice) -> list[int]:
    return [99] * choice.count if choice.results else list(choice.candidates[: choice.count])


@pytest.fixture(autouse=True)
def _in_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "selections_of_a_test", sys.modules[__name__])


async def issued_prompts(path: Path, config: RunConfig, *lives: range) -> list[str]:
    """Return the prompts in the order of their tickets. Prompts with an even number are solved by
    one of their two samples. A life of the buffer ends after half of the next batch was issued,
    which is issued again.
    """
    issued = []
    for steps in lives:
        life = {"incarnation": str(steps)}
        async with opened(path, config, FakePrompts(num_train=40)) as service:
            for version in steps:
                puts = []
                for ticket in await tickets(service, version, **life):
                    issued.append(ticket.prompt.prompt_id)
                    is_even = int(ticket.prompt.prompt_id[1:]) % 2 == 0
                    puts.append(put_passes(service, ticket, [is_even, False]))
                await asyncio.gather(*puts)
                await train(service, version)
            await tickets(service, steps.stop, credit=2, **life)
    return issued


@pytest.mark.parametrize("order", ["pools", "priority", "selections_of_a_test:last_rows"])
async def test_a_restarted_buffer_chooses_as_one_that_went_on(tmp_path: Path, order: str) -> None:
    config = selecting(order)
    whole = await issued_prompts(tmp_path / "whole", config, range(9))
    cut = await issued_prompts(tmp_path / "cut", config, range(5), range(5, 9))
    assert cut == whole != [f"t{row}" for row in range(36)]
    assert len(whole) == 36


async def test_rows_that_are_no_prompts_of_the_run_name_the_setting(tmp_path: Path) -> None:
    config = selecting("selections_of_a_test:other_rows")
    # Not an error that is the reply to a request: the run would wait for prompts without an end.
    with pytest.raises(ValueError, match=r"data.order=.*other_rows.*99.*of 0 to 39"):
        await issued_prompts(tmp_path, config, range(2))


RATES = {"never": 0.0, "half": 0.5, "always": 1.0}


async def test_the_gain_of_a_selection_is_forecast_from_a_run_without_it(tmp_path: Path) -> None:
    """Prompts of three data sources, of which each has a pass rate."""
    config = selecting("shuffled", groups_per_step=6)
    rng = np.random.default_rng(0)
    rows = [
        msgspec.structs.replace(FakePrompts().train(row), data_source=[*RATES][row % 3])
        for row in range(600)
    ]
    write_prompts(tmp_path / PROMPTS_FILE, "", {Purpose.TRAIN: rows, Purpose.EVAL: []})
    prompts = open_prompts(tmp_path / PROMPTS_FILE, config, vocabulary_size=1000)
    are_mixed = []
    async with opened(tmp_path, config, prompts) as service:
        for version in range(40):
            puts = []
            for ticket in await tickets(service, version):
                passes = (rng.random(2) < RATES[ticket.prompt.data_source]).tolist()
                are_mixed.append(passes[0] != passes[1])
                puts.append(put_passes(service, ticket, passes))
            await asyncio.gather(*puts)
            await train(service, version)
    [sentence] = selection_gain(tmp_path, config)
    was, number, forecast = map(float, re.findall(r"\d\S*\d", sentence))
    # The standard deviation of two different rewards is 0.5.
    recorded = 0.5 * np.mean(are_mixed)
    assert abs(was - recorded) < 0.02
    assert number == 4 * 8 * 6
    assert forecast > 1.5 * recorded


def prompt(row: int) -> Prompt:
    """Return a prompt with one of three words."""
    return msgspec.structs.replace(
        FakePrompts().train(row), token_ids=np.array([1, 2, 3 + row % 3], np.int32)
    )


def results_of(rates: Sequence[float], batches: int = 10) -> list[Result]:
    """Return results of prompts with three words, of which each has a pass rate."""
    rng = np.random.default_rng(0)
    return [
        Result(row=k, position=k, rewards=(rng.random(8) < rates[k % 3]).astype(float).tolist())
        for k in range(batches * COUNT)
    ]


def choice_of(candidates: Sequence[int], results: Sequence[Result], seed: int = 0) -> Choice:
    return Choice(
        candidates=candidates,
        count=COUNT,
        results=results,
        prompt=prompt,
        rng=np.random.default_rng(seed),
    )


def shares(policy: Any, results: Sequence[Result], num_rows: int = 1200) -> list[float]:
    """Return the share of each word in a batch, on average over ten batches."""
    chosen = [
        row % 3
        for seed in range(10)
        for row in policy(
            choice_of(
                np.random.default_rng(seed + 100).permutation(num_rows)[: 8 * COUNT].tolist(),
                results,
                seed,
            )
        )
    ]
    assert len(chosen) == 10 * COUNT
    return [chosen.count(word) / len(chosen) for word in range(3)]


def test_prompts_are_preferred_whose_words_are_solved_in_part() -> None:
    low, middle, high = shares(priority, results_of((0.02, 0.5, 0.98)))
    assert middle > 0.7
    assert min(low, high) > 0.01, "a prompt that cannot be learned now may be learned later"
    newer = results_of((0.5, 0.0, 0.0), batches=60)[50 * COUNT :]
    older = results_of((0.0, 0.5, 0.0), batches=10)
    assert shares(priority, [*older, *newer])[0] > 0.6, "a result says less the older it is"


def test_half_of_a_batch_comes_from_the_pool_and_the_longest_rested_first() -> None:
    results = results_of((0.0, 0.5, 1.0))
    candidates = list(range(1000, 1096))
    chosen = pools(choice_of(candidates, results))
    mixed = [r.row for r in results if 0 < sum(r.rewards) < 8]
    assert chosen == [*mixed[: COUNT // 2], *candidates[: COUNT // 2]]
    # The newest four batches may still be in training; a repeated prompt counts by its newest.
    repeated = Result(row=mixed[0], position=len(results), rewards=[1.0, 1.0])
    chosen = pools(choice_of(candidates, [*results, repeated]))
    assert chosen[: COUNT // 2] == mixed[1 : COUNT // 2 + 1]
    young = results[-3 * COUNT :]
    assert pools(choice_of(candidates, young)) == candidates[:COUNT]


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
async def test_solved_prompts_leave_also_after_a_restart(tmp_path: Path) -> None:
    """Steps of two groups. The prompts t0 and t1 are always solved, the others never."""
    config = make_config(max_staleness=0)
    chosen = replace(config.data.filter, above=0.5, max_share=0.4)
    config = replace(config, data=replace(config.data, filter=chosen))
    issued = []
    for steps in (range(2), range(2, 6)):
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
