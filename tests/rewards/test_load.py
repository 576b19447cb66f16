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

NUM_JOBS = int(os.environ.get("ASYNC_RL_LOAD_JOBS", "600"))
NUM_CLIENTS = 64
KILL_EVERY_S = 0.4
GROWTH_BYTES = 48 << 20


def _job(index: int) -> tuple[dict[str, Any], str]:
    """A request and its right verdict; every kind of test and every verdict that takes no long
    computation.
    """
    call = [{"kind": "call", "function": "f", "args": [n], "expected": n * index} for n in range(4)]
    stdin = [{"kind": "stdin", "input": f"{n}\n", "output": str(n + index)} for n in range(3)]
    programs: list[tuple[str, list[dict[str, Any]], str]] = [
        (f"def f(x): return x * {index}", call, "pass"),
        (f"def f(x): return x * {index} + (x > 2)", call, "wrong_answer"),
        ("def f(x): raise KeyError(x)", call, "runtime_error"),
        ("def f(x: return x", call, "compile_error"),
        ("def f(x): return [0] * 10**9", call, "memory"),
        (f"print(int(input()) + {index})", stdin, "pass"),
        ("print(input())", stdin, "wrong_answer" if index else "pass"),
        ("while True: print('x' * 1000)", stdin, "output_limit"),
        (
            f"def f(x): return x * {index}",
            [{"kind": "assert", "code": f"assert f(3) == {3 * index}"}],
            "pass",
        ),
        (
            "def f(x): return x",
            [{"kind": "assert", "code": "y = f(3)\nassert y == 4"}],
            "wrong_answer",
        ),
    ]
    code, tests, verdict = programs[index % len(programs)]
    return {"code": code, "tests": tests, "timeout_s": 5, "memory_mb": 128}, verdict


async def _load(url: str, server: psutil.Process) -> tuple[Counter[str], int, list[int]]:
    jobs = iter(range(NUM_JOBS))
    counts: Counter[str] = Counter()
    killed, memory = 0, []

    async def client(http: httpx.AsyncClient) -> None:
        for index in jobs:
            request, right = _job(index)
            while True:
                response = await http.post(f"{url}/verify", json=request)
                if response.status_code == 429:
                    await asyncio.sleep(float(response.headers["Retry-After"]) / 20)
                    continue
                verdict = response.json()["verdict"]
                counts["infrastructure_error"] += verdict == "infrastructure_error"
                if verdict != "infrastructure_error":
                    break
            assert verdict == right, (request, response.text)
            counts["done"] += 1
            if counts["done"] % max(1, NUM_JOBS // 10) == 0:
                memory.append(server.memory_info().rss)

    async def killer() -> None:
        nonlocal killed
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            cells = server.children()
            if cells:
                random.choice(cells).send_signal(signal.SIGKILL)
                killed += 1

    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(
        headers={"Authorization": "Bearer t"}, timeout=60, limits=limits
    ) as http:
        killing = asyncio.create_task(killer())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_CLIENTS):
                    group.create_task(client(http))
        finally:
            killing.cancel()
    return counts, killed, memory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_of_many_jobs_gets_its_right_verdict_while_cells_are_killed() -> None:
    command = [
        sys.executable,
        "-m",
        "async_rl.launchers.cli",
        "verifier",
        "--token",
        "t",
        "verifiers.cells=2",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        try:
            url = process.stdout.readline().split()[2]
            counts, killed, memory = asyncio.run(_load(url, psutil.Process(process.pid)))
        finally:
            process.terminate()
            process.stdout.read()
    assert counts["done"] == NUM_JOBS, dict(counts)
    assert killed > 0
    assert memory[-1] - memory[0] < GROWTH_BYTES, memory
    assert process.returncode == 0
