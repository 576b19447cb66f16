from __future__ import annotations

import asyncio

import pytest

from async_rl.core.os import owner_only
from async_rl.sandbox import cells as cells_module
from async_rl.sandbox.cell import Cell, CellFailed, job
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.sandbox.protocol import NOTHING, JobSpec, Mode, read_frames

REQUEST = JobSpec(Mode.CALLS, 1, cpu_s=1, memory_bytes=128 << 20, output_bytes=1 << 16)


def test_machine_without_a_jail_is_refused_with_the_reasons_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Cell.start

    async def refuse(level: int, readable: list[str], packages: dict[str, str]) -> Cell:
        if level < NOTHING:
            raise CellFailed(f"level {level} is forbidden here")
        return await start(level, readable, packages)

    monkeypatch.setattr(cells_module.Cell, "start", refuse)

    async def unsafe() -> tuple[int, bytes]:
        async with await Cells.start(1, allow_unsafe=True) as cells:
            outcome = await cells.run(
                job(REQUEST, ("def f(x): return x * x", [("f", [3])], False, False))
            )
            return cells.level, read_frames(outcome.contents[0], 1).frames[-1].body

    with pytest.raises(
        Unsafe,
        match=r"level 1 is forbidden here; level 2 is forbidden here.*sandbox\.allow_unsafe=true",
    ):
        asyncio.run(Cells.start(1))
    assert asyncio.run(unsafe()) == (NOTHING, b"9")


def test_the_jail_is_as_strong_in_a_run_which_writes_for_its_owner_only() -> None:
    async def level() -> int:
        async with await Cells.start(1) as cells:
            return cells.level

    before = asyncio.run(level())
    with owner_only():
        assert asyncio.run(level()) == before


def test_cell_that_cannot_start_says_why() -> None:
    with pytest.raises(CellFailed, match="at level 3 did not start: ModuleNotFoundError"):
        asyncio.run(Cell.start(NOTHING, [], {"no_such_package": "/"}))
