"""When the learner saves. `tests/world` states what it does around a checkpoint."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composing import compose

from async_rl.observability.activity import Activity
from async_rl.protocol.buffer import EvaluationScores
from async_rl.training import saving


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
    async def call_buffer(_: object) -> EvaluationScores:
        return EvaluationScores(pass_rates={})

    async def lead(operation: Any) -> Future[None]:
        Path(operation.directory).mkdir()
        written: Future[None] = Future()
        written.set_result(None)
        return written

    context: Any = SimpleNamespace(
        config=compose("grpo_code", [f"checkpoint.{each}" for each in settings.split()]),
        run_dir=tmp_path,
        activity=Activity(),
        call_buffer=call_buffer,
    )
    pool: Any = SimpleNamespace(lead=lead)
    now_s = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    async with asyncio.TaskGroup() as context.group:
        saver = saving.Saver(context, pool, life=3)
        for start_s in (1000.0, 5000.0):
            for version, after_s, expected in is_due:
                now_s[0] = start_s + after_s
                assert saver.is_due(version) is expected
            now_s[0] = 5000.0
            await saver.save(1)
