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

from async_rl.observability.activity import Activity
from async_rl.protocol.learner import (
    EvaluationScores,
    GetHistory,
    History,
    StartFrom,
    Synced,
    SyncVersion,
)
from async_rl.training import saving

REPLIES: dict[str, Any] = {
    "GetHistory": History(first=0, last=0),
    "SyncVersion": Synced(life=3),
    "GetEvaluationScores": EvaluationScores(pass_rates={}),
}


class World:
    """did: the requests and the files that were put on the disk, in their order."""

    def __init__(self, run_dir: Path) -> None:
        self.did: list[str] = []
        self.requests: list[Any] = []
        self.context: Any = SimpleNamespace(
            config=compose("grpo_code"),
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
        return REPLIES.get(self.did[-1])

    async def lead(self, operation: Any) -> Any:
        Path(operation.directory).mkdir()
        written: Future[None] = Future()
        written.set_result(None)
        self.did.append(type(operation).__name__)
        return written


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
    assert start == saving.Start(version=0, life=3)
    assert world.context.version == 0
    assert world.requests == [
        GetHistory(),
        SyncVersion(version=0, incarnation="life"),
        StartFrom(life=3, version=0),
    ]
