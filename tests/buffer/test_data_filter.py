"""Prompts that leave the data: decided at the desk, kept in the store, the same after a restart,
shown by the ledger.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from buffer_support import (
    FakePrompts,
    commit,
    make_config,
    opened,
    put,
    take,
    tickets,
    within,
)

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import left_prompts, reading, summary
from async_rl.composition.compose import write_config
from async_rl.config.base import replace
from async_rl.config.run import RunConfig
from async_rl.launchers import cli


def filtering(above: float | None, max_share: float = 0.5) -> RunConfig:
    config = make_config(groups_per_step=2, max_staleness=0)
    return replace(
        config,
        data=replace(
            config.data, filter=replace(config.data.filter, above=above, max_share=max_share)
        ),
    )


async def train(service: BufferService, steps: range) -> list[str]:
    """Steps of two groups; the prompts t0 and t1 are always solved, the others never. Returns the
    prompts in the order of their tickets.
    """
    issued = []
    for version in steps:
        for ticket in await tickets(service, version):
            issued.append(ticket.prompt.prompt_id)
            await put(service, ticket, passes=ticket.prompt.prompt_id in ("t0", "t1"))
        batch = await take(service, version)
        await commit(service, version + 1, [g.group_id for g in batch.groups])
    return issued


def trained_prompts(path: Path, config: RunConfig, *lives: range) -> list[str]:
    """What is issued when the buffer lives so often, over the steps of each life."""

    async def scenario() -> list[str]:
        issued = []
        for steps in lives:
            async with opened(path, config, FakePrompts(num_train=4)) as service:
                issued += await train(service, steps)
        return issued

    return asyncio.run(within(scenario(), 30))


def test_solved_prompts_are_issued_no_more_from_the_next_epoch_on(tmp_path: Path) -> None:
    assert trained_prompts(tmp_path, filtering(0.5), range(4)) == [
        "t0",
        "t1",
        "t2",
        "t3",
        "t2",
        "t3",
        "t2",
        "t3",
    ]


def test_without_a_bound_they_are_issued_for_ever(tmp_path: Path) -> None:
    assert trained_prompts(tmp_path, filtering(None), range(4)) == ["t0", "t1", "t2", "t3"] * 2


@pytest.mark.covers("dataset filter after a resume")
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_buffer_that_starts_again_goes_on_with_the_same_prompts(tmp_path: Path, cut: int) -> None:
    found = trained_prompts(tmp_path, filtering(0.5, max_share=0.4), range(cut), range(cut, 6))
    assert found == ["t0", "t1", "t2", "t3", "t1", "t2", "t3", "t2", "t3", "t2", "t3", "t2"]


def test_the_ledger_tells_who_left_when_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / "filtered"
    run_dir.mkdir(parents=True)
    config = filtering(0.5)
    trained_prompts(run_dir, config, range(3))
    with reading(run_dir / "store.sqlite") as connection:
        assert [
            (left.prompt_id, left.position, left.score) for left in left_prompts(connection)
        ] == [
            ("t0", 4, 1.0),
            ("t1", 4, 1.0),
        ]
        assert summary(connection).num_left == 2
    write_config(config, run_dir / "config.yaml")
    monkeypatch.setattr(
        "sys.argv",
        ["async-rl", "ledger", "filtered", "--left", "--json", f"--output-dir={tmp_path / 'runs'}"],
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert [row["prompt_id"] for row in json.loads(capsys.readouterr().out)] == ["t0", "t1"]
