"""A batch on which the learner fails: its groups are dropped, and training continues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from buffer_support import make_config, opened, problems, put_all, sync, within

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.ledger import OF_STATE, histories, reading
from async_rl.config.base import replace
from async_rl.core.errors import NonFiniteError, root_cause
from async_rl.core.heads import GroupHead
from async_rl.core.types import GroupState
from async_rl.observability.activity import Activity
from async_rl.processes import learner as process
from async_rl.protocol.base import Message
from async_rl.protocol.learner import StartFrom
from async_rl.protocol.membership import Member, Members
from async_rl.runtime.directory import Directory
from async_rl.training.device import Device
from async_rl.training.operations import Step

CONFIG = make_config(groups_per_step=2, num_steps=4)


class Buffer:
    """The buffer, whose generator has a group for every free place."""

    def __init__(self, service: BufferService) -> None:
        self._service = service

    async def call(self, request: Message, *, wait_s: float = 0.0) -> Message:
        await put_all(self._service, self._service.state.replay.learner_version)
        return await self._service.handlers()[type(request)](request)


class Pool:
    """Trains everything but what `fails` says; notes the groups of each step."""

    def __init__(self, fails: Callable[[int, list[int]], Exception | None]) -> None:
        self.trained: list[list[int]] = []
        self._fails = fails
        self._fetched: dict[int, list[int]] = {}

    async def fetch(
        self, heads: list[GroupHead], train_version: int, *, life: int, timeout_s: float
    ) -> None:
        self._fetched[train_version] = [head.group_id for head in heads]

    async def keep_advantages(self, advantages: object) -> None:
        pass

    @property
    def parts(self) -> Pool:
        return self

    async def lead(self, operation: Step) -> Any:
        version = operation.version
        ids = self._fetched[version]
        error = self._fails(version, ids)
        if error is not None:
            raise error
        self.trained.append(ids)
        scalars = dict.fromkeys(
            ("tokens/trained", "policy/effective_sequences", "policy/step_scale"), 1.0
        )
        return SimpleNamespace(scalars=scalars, advantages={})


class Quiet:
    """Stands for pusher and saver, which have nothing to do with batches."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def publish(self, version: int) -> None:
        pass

    live = take_device = save = finish = settle = publish  # type: ignore[assignment]

    def metrics(self) -> dict[str, float]:
        return {}

    def is_due(self, version: int) -> bool:
        return False


async def train(service: BufferService, pool: Pool, patch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> None:
        pass

    directory = Directory()
    generator = Member(
        name="generator-0", role="generator", pid=1, address="a", state="", since_s=0
    )
    directory.update(Members(revision=1, members=[generator]))
    context: Any = SimpleNamespace(
        config=replace(CONFIG, evaluation=replace(CONFIG.evaluation, every_steps=0)),
        activity=Activity(),
        directory=directory,
        stopping=asyncio.Event(),
        log=logging.getLogger("learner"),
        report=nothing,
        call_buffer=Buffer(service).call,
    )
    patch.setattr(process, "Pusher", Quiet)
    patch.setattr(process, "Saver", Quiet)
    patch.setattr(Quiet, "take_device", nothing)
    patch.setattr(Quiet, "finish", nothing)
    patch.setattr(Quiet, "settle", nothing)
    start = StartFrom(version=0, life=await sync(service, 0, "life"))
    rank_device: Any = None
    learner: Any = process.Learner(context, pool, Device(), rank_device, start)  # type: ignore[arg-type]
    await learner.train()


def run(tmp_path: Path, pool: Pool, patch: pytest.MonkeyPatch) -> BaseException | None:
    async def scenario() -> None:
        async with opened(tmp_path, CONFIG) as service:
            await train(service, pool, patch)

    try:
        asyncio.run(within(scenario(), 60))
    except BaseExceptionGroup as group:
        return root_cause(group)
    finally:
        assert problems(tmp_path, CONFIG) == []
    return None


def dropped(tmp_path: Path) -> list[tuple[int, str, str]]:
    with reading(tmp_path) as connection:
        groups = histories(connection, OF_STATE, GroupState.DROPPED)
        return [(group.group_id, group.reason, group.message) for group in groups]


def test_batches_that_fail_at_different_steps_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []

    def twice_per_step(version: int, _: list[int]) -> Exception | None:
        failed.append(version)
        return NonFiniteError("loss nan") if failed.count(version) <= 2 else None

    pool = Pool(twice_per_step)
    assert run(tmp_path, pool, monkeypatch) is None
    assert len(dropped(tmp_path)) == 16
    assert len(pool.trained) == 4
