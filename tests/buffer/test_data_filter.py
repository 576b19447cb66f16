"""Prompts that leave the data: decided at the desk, kept in the store, the same after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from buffer_support import FakePrompts, make_config, opened, put, tickets, train

from async_rl.buffer.store.ledger import reading, summary
from async_rl.config.base import replace
from async_rl.config.run import RunConfig


def filtering(max_share: float) -> RunConfig:
    config = make_config(max_staleness=0)
    chosen = replace(config.data.filter, above=0.5, max_share=max_share)
    return replace(config, data=replace(config.data, filter=chosen))


async def trained_prompts(path: Path, config: RunConfig, *lives: range) -> list[str]:
    """Return the prompts in the order of their tickets: steps of two groups in several lives of the
    buffer. The prompts t0 and t1 are always solved, the others never.
    """
    issued = []
    for steps in lives:
        async with opened(path, config, FakePrompts(num_train=4)) as service:
            for version in steps:
                for ticket in await tickets(service, version):
                    prompt_id = ticket.prompt.prompt_id
                    issued.append(prompt_id)
                    await put(service, ticket, passes=prompt_id in ("t0", "t1"))
                await train(service, version)
    return issued


@pytest.mark.covers("dataset filter after a resume")
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_solved_prompts_leave_at_the_next_epoch_also_after_a_restart(
    tmp_path: Path, cut: int
) -> None:
    found = await trained_prompts(tmp_path, filtering(0.4), range(cut), range(cut, 6))
    assert found == ["t0", "t1", "t2", "t3", "t1", "t2", "t3", "t2", "t3", "t2", "t3", "t2"]


async def test_the_ledger_counts_the_prompts_that_left(tmp_path: Path) -> None:
    await trained_prompts(tmp_path, filtering(0.5), range(3))
    with reading(tmp_path) as connection:
        assert summary(connection).num_left == 2
