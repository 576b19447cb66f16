"""Selected prompts: what the policies choose, and that a restarted buffer chooses the same."""

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from buffer_support import FakePrompts, make_config, opened, put_passes, tickets, train

from async_rl.buffer.policies import Choice, Result, pools, priority
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.core.types import Prompt, Purpose
from async_rl.data.prompt_file import PROMPTS_FILE, open_prompts
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


async def issued_prompts(
    path: Path, config: RunConfig, *lives: range, num_train: int = 40
) -> list[str]:
    """Return the prompts in the order of their tickets. Prompts with an even number are solved by
    one of their two samples. A life of the buffer ends after half of the next batch was issued,
    which is issued again.
    """
    issued = []
    for steps in lives:
        life = {"incarnation": str(steps)}
        async with opened(path, config, FakePrompts(num_train=num_train)) as service:
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


async def mixed_share(path: Path, order: str, num_steps: int = 40) -> float:
    """Return the share of groups with different rewards in a run on prompts of three data sources,
    of which each has a pass rate.
    """
    path.mkdir()
    config = selecting(order, groups_per_step=6)
    rng = np.random.default_rng(0)
    rows = [
        msgspec.structs.replace(FakePrompts().train(row), data_source=[*RATES][row % 3])
        for row in range(600)
    ]
    write_prompts(path / PROMPTS_FILE, "", {Purpose.TRAIN: rows, Purpose.EVAL: []})
    prompts = open_prompts(path / PROMPTS_FILE, config, vocabulary_size=1000)
    num_mixed = []
    async with opened(path, config, prompts) as service:
        for version in range(num_steps):
            puts = []
            for ticket in await tickets(service, version):
                passes = (rng.random(2) < RATES[ticket.prompt.data_source]).tolist()
                num_mixed.append(passes[0] != passes[1])
                puts.append(put_passes(service, ticket, passes))
            await asyncio.gather(*puts)
            await train(service, version)
    assert len(num_mixed) == num_steps * 6
    return sum(num_mixed) / len(num_mixed)


async def test_a_selection_brings_at_least_what_was_forecast(tmp_path: Path) -> None:
    recorded = await mixed_share(tmp_path / "recorded", "shuffled")
    [sentence] = selection_gain(tmp_path / "recorded", selecting("shuffled", groups_per_step=6))
    was, number, forecast = map(float, re.findall(r"\d\S*\d", sentence))
    # The standard deviation of two different rewards is 0.5.
    assert abs(was - 0.5 * recorded) < 0.02
    assert number == 4 * 8 * 6
    made = await mixed_share(tmp_path / "made", "priority")
    assert 1.5 * recorded < 2 * forecast < made + 0.05
    assert made > 2 * recorded
    # Its own prompts are no sample of the order.
    assert not [*selection_gain(tmp_path / "made", selecting("priority", groups_per_step=6))]


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


@pytest.mark.parametrize("policy", [pools, priority])
def test_a_batch_is_full_although_there_are_fewer_prompts(policy: Any) -> None:
    results = [
        Result(row=k % 4, position=k, rewards=[0.0, 1.0, k % 4 > 1]) for k in range(8 * COUNT)
    ]
    candidates = [k % 4 for k in range(8 * COUNT)]
    chosen = policy(choice_of(candidates, results))
    assert len(chosen) == COUNT
    assert set(chosen) == {0, 1, 2, 3}
