"""Many clients with a hostile mix of programs against one verifier, for a given time.

Six of ten programs are right, one is wrong, and the rest try to hold a cell, the server or the
machine: endless loops, short sleeps, memory, endless output, values that are slow to compare,
crashes, forged frames. Some clients leave before the answer. Every verdict is known beforehand. The
report has wrong verdicts, infrastructure errors, latencies against the limit of the slowest
program, memory of the server, and the processes and files that remain after the orderly stop.

    python -m benchmarks.verifier.verifier_load --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.figures import figure

LIMIT_S = 6.0
"""That of conf/. One program in fifty uses it up."""
NUM_CLIENTS = 64
LEAVE_SHARE = 0.02
"""Requests whose client disconnects before the answer."""
SAMPLE_S = 1.0
CALLS = [{"kind": "call", "function": "f", "args": [n], "expected": n * n} for n in (3, 4)]
INPUTS = [{"kind": "stdin", "input": f"{n}\n", "output": str(n * n)} for n in (3, 4)]
JUDGED = [{"kind": "assert", "code": "def h(x):\n    return f(x)\nassert h(3) == 9 and f(4) == 16"}]
CHECKER = {"code": "import sys\nsys.exit(42 if sys.stdin.read().strip() == '9' else 43)"}
CHECKED = [{**INPUTS[0], "checker": {**CHECKER, "form": "kattis"}}]
WORSE = {"wrong_answer", "runtime_error", "timeout", "memory", "output_limit"}
"""A hostile program may end in any of these; which one, the limits race to decide."""
PROGRAMS: list[tuple[str, list[dict[str, Any]], set[str]]] = [
    ("def f(x): return x * x", CALLS, {"pass"}),
    ("print(int(input()) ** 2)", INPUTS, {"pass"}),
    ("def f(x): return x ** 2", JUDGED, {"pass"}),
    ("print(int(input()) ** 2)", CHECKED, {"pass"}),
    ("def f(x): return x * x + (x > 3)", CALLS, {"wrong_answer"}),
    ("def f(x: return x", CALLS, {"compile_error"}),
    ("while True: pass", CALLS, {"timeout"}),
    ("import time\nwhile True: time.sleep(0.001)", INPUTS, {"timeout"}),
    ("while True: print('x' * 1000)", INPUTS, {"output_limit"}),
    ("def f(x): return [0] * 10**9", CALLS, {"memory"}),
    ("def f(x): return [[i, [i]] for i in range(20_000)]", CALLS, WORSE),
    ("def f(x): return {(2**61 - 1) * i for i in range(1500)}", CALLS, WORSE),
    ("import os\ndef f(x): os._exit(0)", JUDGED, WORSE),
    ("import ctypes\ndef f(x): ctypes.string_at(0)", CALLS, WORSE),
    (
        "import os, time\ndef f(x):\n    for fd in range(64):\n"
        "        try: os.write(fd, b'0 p 0\\n')\n        except OSError: pass\n    return 1",
        JUDGED,
        WORSE,
    ),
    ("import threading\nfor i in range(30): threading.Thread(target=print).start()\nraise OSError",
     CALLS, WORSE),
    ("open('/tmp/x', 'w').write('x' * 10**5)\nfor i in range(99): open(f'/tmp/{i}', 'w')",
     INPUTS, WORSE),
]  # fmt: skip
WEIGHTS = [20, 20, 10, 10, 8, 4, 1, 1, *[3] * (len(PROGRAMS) - 8)]


@dataclass(slots=True)
class Report:
    """The results as the clients saw them."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    num_left: int = 0


async def client(http: httpx.AsyncClient, url: str, seed: int, end: float, seen: Report) -> None:
    """Send programs one after the other until the end."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        code, tests, right = rng.choices(PROGRAMS, WEIGHTS)[0]
        request = {"code": code, "tests": tests, "timeout_s": LIMIT_S, "memory_mb": 128}
        leaves = rng.random() < LEAVE_SHARE
        started = time.monotonic()
        try:
            reply = await http.post(
                f"{url}/verify", json=request, timeout=rng.uniform(0.01, 0.5) if leaves else 300
            )
        except httpx.TimeoutException:
            seen.num_left += 1
            continue
        if reply.status_code == 429:
            await asyncio.sleep(0.1)
            continue
        seen.latencies_s.append(time.monotonic() - started)
        verdict = reply.json()["verdict"] if reply.status_code == 200 else str(reply.status_code)
        seen.verdicts[verdict] += 1
        if verdict not in right:
            seen.wrong.append(f"{verdict} for {code!r}: {reply.text[:300]}")


async def load(url: str, server: psutil.Process, seconds: float) -> Report:
    """Run all clients."""
    seen, end = Report(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(headers=headers, limits=limits, trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            for seed in range(NUM_CLIENTS):
                group.create_task(client(http, url, seed, end, seen))
            while time.monotonic() < end:
                await asyncio.sleep(SAMPLE_S)
                seen.memory.append(server.memory_info().rss)
        health = (await http.get(f"{url}/health")).json()
    figure("cells replaced", health["cells_replaced"], "", goal="0")
    return seen


def report(seen: Report, seconds: float) -> None:
    """Print the figures and the wrong verdicts."""
    figure("verdicts", len(seen.latencies_s) / seconds, "1/s")
    figure("clients that left", seen.num_left, "")
    figure("wrong verdicts", len(seen.wrong), "", goal="0")
    figure("infrastructure errors", seen.verdicts["infrastructure_error"], "", goal="0")
    points = statistics.quantiles(seen.latencies_s, n=100)
    figure("latency p50", points[49], "s")
    figure("latency p99", points[98], "s", goal=f"< {3 * LIMIT_S:g}")
    # The first tenth fills caches; what grows after it would grow on.
    warm = seen.memory[len(seen.memory) // 10 :]
    third = max(1, len(warm) // 3)
    growth = statistics.median(warm[-third:]) - statistics.median(warm[:third])
    figure("growth of the server's memory", growth / (1 << 20), "MB", goal="< 8")
    print(dict(seen.verdicts))
    for line in seen.wrong[:20]:
        print(f"wrong: {line}")


def main() -> None:
    """Start a verifier, load it, stop it, and look for remaining processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    cells = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "async_rl.launchers.cli", "verifier", "--token", "t"]
    with subprocess.Popen(
        [*command, f"verifiers.cells={cells}"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        server = psutil.Process(process.pid)
        try:
            seen = asyncio.run(load(url, server, given.seconds))
            inside = server.children(recursive=True)
        finally:
            started = time.monotonic()
            process.terminate()
            process.stdout.read()
    figure("orderly stop", time.monotonic() - started, "s")
    figure("exit status", process.returncode, "", goal="0")
    # The init of a container may leave dead processes uncollected.
    left = [child for child in inside if child.is_running() and child.status() != "zombie"]
    figure("processes left", len(left), "", goal="0")
    report(seen, given.seconds)


if __name__ == "__main__":
    main()
