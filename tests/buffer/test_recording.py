"""What a store records for `explain`, `plan` and `replay`, and how long it stays."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from buffer_support import forget, make_group, opened, tickets, train

from async_rl.buffer.store.ledger import reading
from async_rl.buffer.store.times import group_times
from async_rl.buffer.store.trajectories import complete_steps
from async_rl.core.heads import pack_group
from async_rl.protocol.buffer import PutGroup


async def make_run(path: Path, *, num_steps: int, recording: str, clock: tuple[float, ...]) -> None:
    async with opened(path, recording=recording) as service:
        for version in range(num_steps):
            for ticket in await tickets(service, version):
                group = make_group(ticket, versions=[version] * 3)
                samples = [msgspec.structs.replace(t, clock=clock) for t in group.trajectories]
                group = msgspec.structs.replace(group, trajectories=samples)
                await service.put_group(PutGroup(payload=pack_group(group)))
            await train(service, version)
            await forget(service, version + 1)


def test_the_moments_of_each_sample_are_read_from_the_store(tmp_path: Path) -> None:
    asyncio.run(make_run(tmp_path, num_steps=1, recording="times", clock=(0.25, 1.5, 2.0)))
    first = group_times(tmp_path)[0]
    assert first.samples.tolist() == [[3, 0.25, 1.5, 2.0], [3, 0.25, 1.5, 2.0]]


def test_without_recorded_moments_the_times_of_groups_remain(tmp_path: Path) -> None:
    asyncio.run(make_run(tmp_path, num_steps=1, recording="off", clock=()))
    first = group_times(tmp_path)[0]
    assert (first.generation_s, len(first.samples)) == (0.5, 0)


ALL = list(range(1, 13))


@pytest.mark.parametrize(
    ("total", "free", "stored"),
    # GB; a large disk may be used to 98 %.
    [(250, 6, ALL), (250, 4, [11, 12]), (20, 4, ALL), (20, 1, [11, 12])],
)
def test_all_trajectories_stay_until_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, stored: list[int]
) -> None:
    usage = SimpleNamespace(total=total * 10**9, free=free * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    asyncio.run(make_run(tmp_path, num_steps=12, recording="full", clock=()))
    with reading(tmp_path) as store:
        # One step in ten is deleted at each checkpoint, the oldest first, but not the newest two.
        assert complete_steps(store) == stored
