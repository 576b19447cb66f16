"""What the learner does around its checkpoints. A recorder stands for the other processes."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose

from async_rl.core.errors import ProtocolError
from async_rl.observability.activity import Activity
from async_rl.protocol.learner import (
    EvaluationScores,
    ForgetBefore,
    GetHistory,
    History,
    StartFrom,
    Synced,
    SyncVersion,
)
from async_rl.training import saving
from async_rl.training.checkpoints import versions


class World:
    """did: the requests and the files that were put on the disk, in their order. written: the
    result of the next save.
    """

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        self.did: list[str] = []
        self.written: Future[None] = Future()
        self.written.set_result(None)
        self.replies: dict[str, Any] = {
            "GetHistory": History(first=0, last=0),
            "SyncVersion": Synced(life=3),
            "GetEvaluationScores": EvaluationScores(pass_rates={}),
        }
        self.requests: list[Any] = []
        self.context: Any = SimpleNamespace(
            config=compose("grpo_code", list(overrides)),
            run_dir=run_dir,
            incarnation="life",
            version=-1,
            activity=Activity(),
            log=logging.getLogger(),
            call_buffer=self.call,
            supervisor=SimpleNamespace(call=self.call),
        )
        self.pool: Any = self

    async def call(self, request: Any, *, timeout_s: float = 0.0) -> Any:
        self.did.append(type(request).__name__)
        self.requests.append(request)
        return self.replies.get(self.did[-1])

    async def lead(self, operation: Any) -> Any:
        Path(operation.directory).mkdir()
        self.did.append(type(operation).__name__)
        return self.written


async def test_rows_and_store_are_on_the_disk_before_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    monkeypatch.setattr(saving, "sync", lambda path: world.did.append(path.name))
    (tmp_path / "metrics.jsonl").touch()
    async with asyncio.TaskGroup() as world.context.group:
        saver = saving.Saver(world.context, world.pool, life=3)
        await saver.save(5)
        await saver.finish()
    assert world.did[:3] == ["SecureStore", "metrics.jsonl", "Save"]


async def test_a_learner_shows_the_version_from_which_it_resumes(tmp_path: Path) -> None:
    world = World(tmp_path)
    start = await saving.resume(world.context, world.pool)
    assert start == StartFrom(version=0, life=3)
    assert world.context.version == 0
    assert world.requests == [
        GetHistory(),
        SyncVersion(version=0, incarnation="life"),
        StartFrom(life=3, version=0),
    ]


async def test_a_checkpoint_waits_for_the_previous_one_and_a_version_is_saved_once(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "checkpoint.keep=1")
    async with asyncio.TaskGroup() as world.context.group:
        saver = saving.Saver(world.context, world.pool, life=3)
        world.written = Future()
        await saver.save(5)
        next_one = asyncio.create_task(saver.save(6))
        await asyncio.sleep(0)
        assert world.did == ["SecureStore", "Save"]
        world.written.set_result(None)
        await next_one
        await saver.finish()
        await saver.finish()
        await saver.save(6)
    one = ["SecureStore", "Save", "GetEvaluationScores", "ForgetBefore"]
    assert world.did == one * 2
    forgotten = [it.version for it in world.requests if isinstance(it, ForgetBefore)]
    assert (versions(tmp_path), forgotten) == ([6], [5, 6])


@pytest.mark.parametrize(
    ("settings", "is_due"),
    [
        ("every_steps=5 every_minutes=0", [(4, 9e9, False), (5, 0, True), (10, 0, True)]),
        ("every_steps=0 every_minutes=10", [(5, 599, False), (5, 600, True)]),
        ("every_steps=0 every_minutes=0", [(0, 9e9, False), (5, 0, False)]),
    ],
)
async def test_a_checkpoint_is_due_by_steps_or_by_the_time_since_the_last_one_began(
    settings: str,
    is_due: list[tuple[int, float, bool]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(tmp_path, *(f"checkpoint.{each}" for each in settings.split()))
    now_s = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    async with asyncio.TaskGroup() as world.context.group:
        saver = saving.Saver(world.context, world.pool, life=3)
        for start_s in (1000.0, 5000.0):
            for version, after_s, expected in is_due:
                now_s[0] = start_s + after_s
                assert saver.is_due(version) is expected
            now_s[0] = 5000.0
            await saver.save(1)


@pytest.mark.parametrize(("first", "is_newer"), [(1, True), (0, False)])
async def test_a_learner_that_the_buffer_refuses_chooses_again_if_the_history_has_moved(
    first: int, is_newer: bool, tmp_path: Path
) -> None:
    """An earlier life has completed a checkpoint meanwhile."""
    world = World(tmp_path)
    answers = [ProtocolError("the trajectories are deleted"), Synced(life=3)]

    async def call(request: Any, *, timeout_s: float = 0.0) -> Any:
        if isinstance(request, SyncVersion) and isinstance(found := answers.pop(0), Exception):
            world.replies["GetHistory"] = History(first=first, last=first)
            raise found
        return await world.call(request)

    world.context.call_buffer = call
    if is_newer:
        start = await saving.resume(world.context, world.pool)
        assert (start.life, world.did[-1]) == (3, "StartFrom")
    else:
        with pytest.raises(ProtocolError, match="are deleted"):
            await saving.resume(world.context, world.pool)
