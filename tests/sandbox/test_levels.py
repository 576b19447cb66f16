from __future__ import annotations

import asyncio

import pytest

from async_rl.sandbox import pool as pool_module
from async_rl.sandbox.cell import Cell, CellFailed, Job, job_request
from async_rl.sandbox.pool import NOTHING, Pool, Unsafe
from async_rl.sandbox.protocol import Mode

REQUEST = job_request(Mode.CALLS, 1, cpu_s=1, memory_bytes=128 << 20, output_bytes=1 << 16)


def test_machine_without_a_jail_is_refused_with_the_reasons_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Cell.start

    async def refuse(level: int, readable: list[str], packages: dict[str, str]) -> Cell:
        if level < NOTHING:
            raise CellFailed(f"level {level} is forbidden here")
        return await start(level, readable, packages)

    monkeypatch.setattr(pool_module.Cell, "start", refuse)

    async def unsafe() -> tuple[int, bytes]:
        async with Pool(1, allow_unsafe=True) as pool:
            outcome = await pool.run(
                Job(REQUEST, ("def f(x): return x * x", [("f", [3], {})], False, False))
            )
            return pool.level, outcome.frames.frames[-1].body

    with pytest.raises(
        Unsafe,
        match=r"level 1 is forbidden here; level 2 is forbidden here.*sandbox\.allow_unsafe=true",
    ):
        asyncio.run(Pool(1).start())
    assert asyncio.run(unsafe()) == (NOTHING, b"9")


def test_cell_that_cannot_start_says_why() -> None:
    with pytest.raises(
        CellFailed, match="at level 9 did not start: ValueError: there is no level 9"
    ):
        asyncio.run(Cell.start(9, []))
