"""Many concurrent clients while cells are killed at random: every job ends with exactly one right
verdict.

ASYNC_RL_LOAD_JOBS=10000 pytest tests/rewards/test_load.py is the long form.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest
from tables import table

NUM_JOBS = int(os.environ.get("ASYNC_RL_LOAD_JOBS", "300"))
NUM_CLIENTS = 64
KILL_EVERY_S = 0.3
GROWTH_BYTES = 48 << 20
PROGRAMS = table(__file__, "programs")


def _job(index: int) -> tuple[dict[str, Any], str]:
    """A request and its right verdict."""
    code, kind, verdict = PROGRAMS[index % len(PROGRAMS)]
    tests: list[dict[str, Any]] = [{"kind": "assert", "code": f"y = f(3)\nassert y == {3 * index}"}]
    if kind == "call":
        tests = [{"kind": kind, "function": "f", "args": [n], "expected": n * index}
                 for n in range(4)]  # fmt: skip
    elif kind == "stdin":
        tests = [{"kind": kind, "input": f"{n}\n", "output": str(n + index)} for n in range(3)]
    code = code.replace("INDEX", str(index))
    return {"code": code, "tests": tests, "timeout_s": 5, "memory_mb": 128}, verdict


async def _load(url: str, server: psutil.Process) -> tuple[int, int, list[int]]:
    jobs = iter(range(1, NUM_JOBS + 1))
    counts: Counter[str] = Counter()
    memory = []

    async def client(http: httpx.AsyncClient) -> None:
        for index in jobs:
            request, right = _job(index)
            while True:
                response = await http.post(f"{url}/verify", json=request)
                if response.status_code == 429:
                    await asyncio.sleep(float(response.headers["Retry-After"]) / 20)
                elif (verdict := response.json()["verdict"]) != "infrastructure_error":
                    break
            assert verdict == right, (request, response.text)
            counts["done"] += 1
            if counts["done"] % max(1, NUM_JOBS // 10) == 0:
                memory.append(server.memory_info().rss)

    async def killer() -> None:
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            if cells := server.children():
                random.choice(cells).send_signal(signal.SIGKILL)
                counts["killed"] += 1

    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as http:
        killing = asyncio.create_task(killer())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CLIENTS):
                    group.create_task(client(http))
        finally:
            killing.cancel()
    return counts["done"], counts["killed"], memory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_many_jobs_gets_its_right_verdict_while_cells_are_killed() -> None:
    launch = [sys.executable, "-m", "async_rl.launchers.cli", "verifier", "--token", "t"]
    with subprocess.Popen(
        [*launch, "verifiers.cells=2"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            url = process.stdout.readline().split()[2]
            done, killed, memory = asyncio.run(_load(url, psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.stdout.read()
    assert done == NUM_JOBS
    assert killed > 0
    assert memory[-1] - memory[0] < GROWTH_BYTES, memory
    assert process.returncode == 0
