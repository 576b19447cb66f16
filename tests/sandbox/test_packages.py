from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from async_rl.sandbox.cell import CellFailed, job
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import LANDLOCK, NAMESPACES, JobSpec, Mode, read_frames

REQUEST = JobSpec(Mode.CALLS, 1, cpu_s=5, memory_bytes=256 << 20, output_bytes=1 << 16)
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
        return sorted(name for name in os.listdir(os.path.dirname(os.path.dirname(numpy.__file__))))
    except PermissionError:
        return ["numpy"]
"""


def _value(packages: list[str], level: int, code: str) -> Any:
    async def run() -> Any:
        async with Cells.of_programs(1, level, packages) as cells:
            assert cells.level == level
            outcome = await cells.run(job(REQUEST, (code, [("f", [3])], False, False)))
            return json.loads(read_frames(outcome.contents[0], 1).frames[-1].body)

    return asyncio.run(run())


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_numpy_computes_in_a_cell_that_has_it(level: int) -> None:
    assert _value(["numpy"], level, LINEAR) == [435, [4.0, 0.0, 0.0, 0.0], 3.0, [1, 2]]


def test_plain_cell_has_no_numpy() -> None:
    assert "No module named 'numpy'" in _value([], NAMESPACES, LINEAR)


@pytest.mark.parametrize("level", [NAMESPACES, LANDLOCK])
def test_nothing_beside_the_package_can_be_read(level: int) -> None:
    assert set(_value(["numpy"], level, BESIDE)) <= {"numpy", "numpy.libs"}
    assert _value(["numpy"], level, "import msgspec\ndef f(x): return 1").startswith(
        ("ModuleNotFoundError", "PermissionError")
    )


def test_package_that_is_missing_is_named() -> None:
    with pytest.raises(
        CellFailed, match=r"'no_such_package' \(sandbox\.packages\) is not installed"
    ):
        Cells.of_programs(1, 1, ["no_such_package"])
