"""Measure the verdicts per second and the latency of the verifier under full isolation.

The verifier runs on one core and on two, and is compared with other ways to run a program. In all
phases on one core, server and cell share the core. Phases alternate in short rounds, so that all
run under the same load of the machine; ratios are medians over rounds. ASYNC_RL_BENCH_PROBLEMS
names a file of problems with reference solutions in a column `code` (the form of MBPP); without it
the programs are from the embedded task.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec

from async_rl.composition.compose import compose_unchecked
from async_rl.config.base import replace
from async_rl.core.errors import at
from async_rl.core.types import StdinTest, Verdict
from async_rl.data.files import read_rows
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import BatchRequest, VerifyRequest
from async_rl.rewards.verifier.server import serve
from async_rl.rewards.verifier.service import open_service
from async_rl.sandbox.cells import Cells
from async_rl.wire.http import listen
from benchmarks.embedded.corpus import flawed_program
from benchmarks.embedded.list_functions import hidden_tests, split
from benchmarks.figures import figure

ROUNDS = 5
SLOW_S = 1.0
"""CPU seconds above which a reference solution is excluded and counted.

A longer one would measure the program instead of the verifier.
"""
PROGRAM = "import sys\ndata = sys.stdin.read().split()\nprint(sum(int(x) for x in data) * {i})\n"
PYTHON = [os.path.realpath(sys.executable), "-I", "-S", "-c"]
"""Python without `site`: its .pth files take ten times as long as the interpreter on some machines.

The verifier is compared with the faster alternative.
"""
BWRAP = [
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--ro-bind",
    "/usr",
    "/usr",
    "--symlink",
    "usr/lib",
    "/lib",
]
BWRAP += [
    "--symlink",
    "usr/lib64",
    "/lib64",
    "--dev",
    "/dev",
    "--tmpfs",
    "/tmp",
    "/usr/bin/python3",
    "-I",
    "-S",
    "-c",
]


_START = "from async_rl.launchers.main import main; main()"


def _problems() -> tuple[list[VerifyRequest], str]:
    if path := os.environ.get("ASYNC_RL_BENCH_PROBLEMS"):
        requests = []
        for place, row in read_rows(path):
            with at(place):
                problem, _ = read_problem(row)
            requests.append(
                VerifyRequest(code=row["code"], tests=problem.tests, setup=problem.setup)
            )
        return requests, "reference solutions"
    rng = random.Random(0)
    rates = [[0.0] * 64] * 3
    return [
        VerifyRequest(code=flawed_program(spec, rates, rng), tests=hidden_tests(spec).tests)
        for spec in split()[0][:400]
    ], "own task"


def _stdin_programs(num_tests: int, count: int) -> list[VerifyRequest]:
    return [
        VerifyRequest(
            code=PROGRAM.format(i=i),
            tests=[StdinTest(input=f"{j} 1\n", output=str((j + 1) * i)) for j in range(num_tests)],
        )
        for i in range(count)
    ]


async def _rate(
    judge: Judge, requests: Sequence[VerifyRequest], side_by_side: int = 1
) -> tuple[float, list[float]]:
    """Return verdicts per second and the seconds of each; all programs must pass."""
    took: list[float] = []
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            started = time.perf_counter()
            response = await judge.verify(request)
            took.append(time.perf_counter() - started)
            if response.verdict is not Verdict.PASS:
                raise RuntimeError(f"a correct program got {response}")

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(side_by_side)))
    return len(requests) / (time.perf_counter() - started), took


def _subprocess_rate(command: Sequence[str], requests: Sequence[VerifyRequest]) -> float:
    """Return programs per second with one process per test."""
    started = time.perf_counter()
    for request in requests:
        for test in request.tests:
            assert isinstance(test, StdinTest)
            done = subprocess.run(
                [*command, request.code],
                input=test.input,
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout.strip() == test.output
    return len(requests) / (time.perf_counter() - started)


async def _one_core(cells: Cells, judge: Judge) -> None:
    problems, name = _problems()
    judged = [(await judge.verify(request)).tests for request in problems]
    quick = [
        request
        for request, tests in zip(problems, judged, strict=True)
        if sum(test.cpu_s for test in tests) < SLOW_S
    ]
    figure("level of the jail", cells.level, "")
    if len(quick) < len(problems):
        figure(f"programs of more than {SLOW_S:g} CPU s, left out", len(problems) - len(quick), "")
    one, ten = _stdin_programs(1, 100), _stdin_programs(10, 60)
    columns: dict[str, list[float]] = {}
    latencies: list[float] = []
    for _ in range(ROUNDS):
        rate, took = await _rate(judge, quick)
        latencies += took
        row = {name: rate, "1": (await _rate(judge, one))[0], "10": (await _rate(judge, ten))[0]}
        row |= {
            "python 1": _subprocess_rate(PYTHON, one[:20]),
            "python 10": _subprocess_rate(PYTHON, ten[:4]),
        }
        if shutil.which("bwrap"):
            row["bwrap"] = _subprocess_rate(BWRAP, one[:20])
        row |= {"ratio 1": row["1"] / row["python 1"], "ratio 10": row["10"] / row["python 10"]}
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    middle = {key: statistics.median(values) for key, values in columns.items()}
    points = statistics.quantiles(latencies, n=100)
    figure(f"one core, {name}", middle[name], "1/s", goal=">= 350")
    figure("latency p50", points[49] * 1e3, "ms")
    figure("latency p99", points[98] * 1e3, "ms", goal="< 10")
    figure("one core, programs of 1 stdin test", middle["1"], "1/s")
    figure("one core, programs of 10 stdin tests", middle["10"], "1/s")
    figure("python -I -S, one process per test: 1 test", middle["python 1"], "1/s")
    figure("python -I -S, one process per test: 10 tests", middle["python 10"], "1/s")
    if "bwrap" in middle:
        figure("bubblewrap and python, 1 test", middle["bwrap"], "1/s")
    else:
        print("bubblewrap is not installed: not measured")
    figure("verifier over python -I -S, 1 test", middle["ratio 1"], "x", goal=">= 3")
    figure("verifier over python -I -S, 10 tests", middle["ratio 10"], "x", goal=">= 20")
    await _http(quick[:256])


async def _http(requests: Sequence[VerifyRequest]) -> None:
    """Measure the time that HTTP adds in batches of 64, including the time of the client.

    Client, server and cell share the core.
    """
    config = compose_unchecked("ppo_code")
    added: list[float] = []
    with listen("127.0.0.1", 0) as listener:
        async with open_service(config) as service:
            ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

            async def tell(url: str) -> None:
                ready.set_result(url)

            stopping = asyncio.Event()
            log = logging.getLogger("benchmark")
            server = asyncio.create_task(
                serve(service, listener, token="t", ready=tell, stopping=stopping, log=log),
                name="server",
            )
            url = await ready
            batches = [
                msgspec.msgpack.encode(BatchRequest(requests=list(requests[i : i + 64])))
                for i in range(0, len(requests), 64)
            ]
            headers = {"Authorization": "Bearer t", "Content-Type": "application/msgpack"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as client:
                for _ in range(ROUNDS):
                    started = time.process_time()
                    for batch in batches:
                        (await client.post(f"{url}/verify_batch", content=batch)).raise_for_status()
                    over_http = time.process_time() - started
                    started = time.process_time()
                    await _rate(service.judge, requests, service.num_cells)
                    added.append((over_http - (time.process_time() - started)) / len(requests))
            stopping.set()
            await server
    figure(
        "HTTP adds per verdict, batches of 64, client included",
        statistics.median(added) * 1e3,
        "ms CPU",
        goal="<= 0.5",
    )


async def _two_cores(judge_of: Callable[[Cells], Judge]) -> None:
    """Compare a server and one cell on one core with a server and two cells on two cores."""
    cores = sorted(os.sched_getaffinity(0))
    requests = _stdin_programs(1, 400)
    ratios: list[float] = []
    async with await Cells.start(2) as double:
        os.sched_setaffinity(0, cores[:1])
        single = await Cells.start(1)
        for _ in range(ROUNDS):
            os.sched_setaffinity(0, cores[:1])
            one, _ = await _rate(judge_of(single), requests, 2)
            os.sched_setaffinity(0, cores)
            two, _ = await _rate(judge_of(double), requests, 4)
            ratios.append(two / one)
        await single.close()
    figure("two cells on two cores over one on one", statistics.median(ratios), "x", goal=">= 1.9")


def _cold_start() -> float:
    """Return the seconds from the command to the line with the address of the server."""
    started = time.perf_counter()
    command = [sys.executable, "-c", _START, "verifier", "--token", "t"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - started
        process.terminate()
        process.stdout.read()
    assert line.startswith("verifier at"), line
    return took


def main() -> None:
    """Measure one core, two cores, and the start of the server."""
    config = replace(compose_unchecked("ppo_code").sandbox, timeout_s=5.0)
    cores = sorted(os.sched_getaffinity(0))

    def judge_of(cells: Cells) -> Judge:
        return Judge(cells, config)

    async def on_one() -> None:
        async with await Cells.start(1) as cells:
            await _one_core(cells, judge_of(cells))

    os.sched_setaffinity(0, cores[-1:])
    asyncio.run(on_one())
    os.sched_setaffinity(0, cores)
    if len(cores) > 1:
        asyncio.run(_two_cores(judge_of))
    figure(
        "cold start of the server",
        statistics.median(_cold_start() for _ in range(3)),
        "s",
        goal="< 1",
    )


if __name__ == "__main__":
    main()
