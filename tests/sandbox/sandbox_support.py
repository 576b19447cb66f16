import asyncio
import json
from collections.abc import Awaitable
from typing import Any

from async_rl.sandbox.cell import Outcome, job
from async_rl.sandbox.cells import Cells
from async_rl.sandbox.protocol import JobSpec, Mode, read_frames

REQUEST = JobSpec(Mode.CALLS, 1, cpu_s=5, memory_bytes=256 << 20, output_bytes=1 << 16)


async def outcome_of(cells: Cells, code: str, *args: Any) -> Outcome:
    """The outcome of f(*args)."""
    return await cells.run(job(REQUEST, (code, [("f", list(args))], False, False)))


async def _values(started: Awaitable[Cells], code: str, *calls: list[Any]) -> tuple[int, list[Any]]:
    async with await started as cells:
        found = [await outcome_of(cells, code, *args) for args in calls]
        bodies = [read_frames(outcome.contents[0], 1).frames[-1].body for outcome in found]
        return cells.level, [json.loads(body) for body in bodies]


def values(started: Awaitable[Cells], code: str, *calls: list[Any]) -> tuple[int, list[Any]]:
    """The level of the cells, and what f returns for each list of arguments."""
    return asyncio.run(_values(started, code, *calls))
