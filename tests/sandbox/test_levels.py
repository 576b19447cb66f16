from __future__ import annotations

import asyncio

import pytest
from sandbox_support import values

from async_rl.core.os import owner_only
from async_rl.sandbox import cells as cells_module
from async_rl.sandbox.cell import Cell, CellFailed
from async_rl.sandbox.cells import Cells, Unsafe
from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES, NOTHING

SQUARE = "def f(x): return x * x"
LINEAR = """
import numpy as np
def f(x):
    a = np.random.default_rng(0).normal(size=(30, 30))
    b = np.linalg.solve(a, a @ np.arange(30.0))
    c = np.fft.fft(np.ones(4)).real.tolist()
    return [int(round(b.sum())), c, float(np.sort(np.array([3, 1, 2])).max()),
    sorted(np.unique([1, 1, 2]).tolist())]
"""
BESIDE = """
import os, numpy
def f(x):
    try:
        return sorted(os.listdir(os.path.dirname(os.path.dirname(numpy.__file__))))
    except PermissionError:
        return ["numpy"]
"""


def test_machine_without_a_jail_is_refused_with_the_reasons_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = Cell.start

    async def refuse(level: int, readable: list[str], packages: dict[str, str]) -> Cell:
        if level < NOTHING:
            raise CellFailed(f"level {level} is forbidden here")
        return await start(level, readable, packages)

    monkeypatch.setattr(cells_module.Cell, "start", refuse)
    said = r"level 1 is forbidden here; level 2 is forbidden here.*sandbox\.allow_unsafe=true"
    with pytest.raises(Unsafe, match=said):
        asyncio.run(Cells.start(1))
    assert values(Cells.start(1, allow_unsafe=True), SQUARE, [3]) == (NOTHING, [9])


def test_the_jail_is_as_strong_in_a_run_which_writes_for_its_owner_only() -> None:
    before = values(Cells.start(1), SQUARE, [3])
    with owner_only():
        assert values(Cells.start(1), SQUARE, [3]) == before


def test_cell_that_cannot_start_says_why() -> None:
    with pytest.raises(CellFailed, match="at level 3 did not start: ModuleNotFoundError"):
        asyncio.run(Cell.start(NOTHING, [], {"no_such_package": "/"}))
    said = r"'no_such_package' \(sandbox\.packages\) is not installed"
    with pytest.raises(CellFailed, match=said):
        Cells.of_programs(1, 1, ["no_such_package"])


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_a_cell_with_numpy_computes_and_shows_nothing_beside_it(level: int) -> None:
    async def start() -> Cells:
        return Cells.of_programs(1, level, ["numpy"])

    found = values(start(), LINEAR, [3])
    assert found == (level, [[435, [4.0, 0.0, 0.0, 0.0], 3.0, [1, 2]]])
    _, (beside,) = values(start(), BESIDE, [3])
    assert set(beside) <= {"numpy", "numpy.libs"}
    _, (said,) = values(start(), "import msgspec\ndef f(x): return 1", [3])
    assert said.startswith(("ModuleNotFoundError", "PermissionError"))
