"""A power loss: what was not synced to the disk is gone, whatever was acknowledged; and the lives
of the learner, of which the newest alone may act.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from buffer_support import opened, settle, step, sync

from async_rl.buffer.service import BufferService
from async_rl.buffer.store.connection import STORE_FILE
from async_rl.core.errors import InfrastructureError, ProtocolError, Superseded
from async_rl.protocol.buffer import (
    CommitStep,
    DropBatch,
    ForgetBefore,
    GetHistory,
    History,
    ReadSequences,
    SecureStore,
    StartEvaluation,
    TakeBatch,
    TakenGroups,
)


async def history(service: BufferService) -> tuple[int, int]:
    reply = await service.history(GetHistory())
    assert isinstance(reply, History)
    return reply.first, reply.last


@pytest.mark.parametrize("kept", [0, 1, 0.3, 0.6])
async def test_with_a_cut_log_the_history_is_what_is_stored(tmp_path: Path, kept: float) -> None:
    """With all of the log, as after a kill of the buffer, that is all that was acknowledged."""
    async with opened(tmp_path) as service:
        for version in range(4):
            await step(service, version)
        shutil.copytree(tmp_path, tmp_path / "after")
    log = tmp_path / "after" / "store.sqlite-wal"
    os.truncate(log, int(log.stat().st_size * kept))
    async with opened(tmp_path / "after") as service:
        first, last = await history(service)
        assert first == 0
        assert last in (range(5) if kept < 1 else [4])
        if last < 4:
            with pytest.raises(ProtocolError, match="the store has no batch for"):
                await sync(service, 4, "b")
        await sync(service, last, "b")
        service.lose("generator-0", "it was killed as well")
        await step(service, last)
        assert await history(service) == (0, last + 1)


async def test_a_reader_that_ends_does_not_delete_the_log_of_a_store_that_was_synced(
    service: BufferService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks of SQLite end with any descriptor of its file that their process closes."""
    await step(service, 0)
    await service.secure_store(SecureStore())
    script = (
        f"import sqlite3; c = sqlite3.connect({str(tmp_path / STORE_FILE)!r});"
        " print(c.execute('SELECT count(*) FROM steps').fetchone()); c.close()"
    )
    reader = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await reader.wait() == 0
    assert (tmp_path / f"{STORE_FILE}-wal").exists()

    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(InfrastructureError, match=r"store\.sqlite cannot be written: .*5"):
        await service.secure_store(SecureStore())


async def test_an_earlier_life_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    async def refused(service: BufferService, life: int) -> None:
        for message in (
            TakeBatch(life=life, train_version=0, wait_s=0),
            ReadSequences(life=life, train_version=0, samples=[(0, 0)]),
            CommitStep(life=life, version=1, group_ids=[0, 1]),
            StartEvaluation(life=life, version=0),
            ForgetBefore(life=life, version=0),
            SecureStore(life=life),
            DropBatch(life=life, train_version=0, group_ids=[0, 1], message=""),
        ):
            with pytest.raises(Superseded, match="life 1 of the learner is refused"):
                await service.handlers()[type(message)](message)

    async with opened(tmp_path) as service:
        old = await sync(service, 0, "a")
        assert await sync(service, 0, "a") == old, "safe to send twice"
        handler: Any = service.handlers()[TakeBatch]
        parked = asyncio.create_task(handler(TakeBatch(life=old, train_version=0, wait_s=60)))
        await settle()
        assert await sync(service, 0, "b") > old
        assert await parked == TakenGroups(groups=[])
        await refused(service, old)
    async with opened(tmp_path) as service:
        await refused(service, old)
        with pytest.raises(Superseded):
            await sync(service, 0, "a")
