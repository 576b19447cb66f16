"""Programs that hold a cell or the server for longer than their limit."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest, CallTest, StdinTest
from async_rl.rewards.verifier.protocol import VerifyRequest, VerifyResponse


def _cpu_s(jail: Jail) -> float:
    """CPU time of all programs that have run in this jail."""
    cells = [psutil.Process(cell.pid) for cell in jail.cells.alive]
    processes = [process for outer in cells for process in (outer, *outer.children())]
    times = [process.cpu_times() for process in processes]
    return sum(time.children_user + time.children_system for time in times)


SLEEPERS = table(__file__, "sleepers")


@pytest.mark.parametrize("name", SLEEPERS)
def test_sleeper_in_short_pieces_is_a_timeout_within_a_small_multiple_of_its_limit(
    jail: Jail, name: str
) -> None:
    for test in (
        CallTest(function="f", args=[3], expected=9),
        AssertTest(code="y = f(3)\nassert y == 9"),
    ):
        started = time.monotonic()
        response = jail.verify(VerifyRequest(code=SLEEPERS[name], tests=[test], timeout_s=0.5))
        took = time.monotonic() - started
        assert response.verdict == "timeout", response
        # 0.5 s of CPU time and 1.5 s of sleep are allowed; tests share a busy machine.
        assert took < 15, took


CLOCK = table(__file__, "clock")


@pytest.mark.parametrize(
    "trick",
    [
        "os.ftruncate(fd, 0)",
        "os.write(fd, b'%d d 0\\n' % n)",
        "os.write(fd, b'x')",
        "os.ftruncate(fd, int(time.time() * 1000) % 1000)",
    ],
)
def test_stream_cannot_reset_its_clock_through_the_result_file(jail: Jail, trick: str) -> None:
    tests = [StdinTest(input=f"{i}\n", output=f"{i}") for i in range(4)]
    code = CLOCK.format(seconds=0.9, trick=trick)
    request = VerifyRequest(code=code, tests=list(tests), timeout_s=0.3, stop_at_first_failure=True)
    before = _cpu_s(jail)
    response = jail.verify(request)
    assert response.verdict != "pass", response
    assert _cpu_s(jail) - before < 0.9  # the limit once together and once alone, or less


def test_call_cannot_reset_its_clock_either(jail: Jail) -> None:
    code = (
        "import os, time\ndef f(x):\n    end = time.process_time() + 0.9\n    k = 0\n"
        "    while time.process_time() < end:\n        for fd in range(3, 9):\n"
        "            try: os.ftruncate(fd, k % 99); k += 1\n"
        "            except OSError: pass\n    return x"
    )
    tests = [CallTest(function="f", args=[i], expected=i) for i in range(4)]
    request = VerifyRequest(code=code, tests=list(tests), timeout_s=0.3)
    assert jail.verify(request).verdict != "pass"


SLOW = table(__file__, "slow")


def test_tests_that_exceed_the_limit_together_pass_one_by_one(jail: Jail) -> None:
    streams = [StdinTest(input=f"{i}\n", output=f"{i}") for i in range(4)]
    calls = [CallTest(function="f", args=[i], expected=i) for i in range(4)]
    sums = [AssertTest(code="assert f(1) == 1 and f(2) == 2")] * 2
    for tests in (streams, calls, sums):
        request = VerifyRequest(code=SLOW, tests=list(tests), timeout_s=0.8)
        response = jail.verify(request)
        assert response.verdict == "pass", response
        assert len(response.tests) == len(tests)
    both = AssertTest(code="assert f(1) == 1 and f(2) == 2 and f(3) == 3 and f(4) == 4")
    one = VerifyRequest(code=SLOW, tests=[both], timeout_s=0.8)
    assert jail.verify(one).verdict == "timeout"


COLLIDING = table(__file__, "colliding")
TESTS: list[Any] = [
    CallTest(function="f", args=[3], expected=[1]),
    AssertTest(code="assert set(f(3)) == {1}"),
    AssertTest(code="assert frozenset(f(3)) == {1}"),
    AssertTest(code="assert dict(f(3)) == {1: 1}"),
    AssertTest(code="assert sum(f(3), []) == [1]"),
    AssertTest(code="assert f(3) in [{1}, {2}]"),
    AssertTest(code="y = f(3)\nassert set(y) == {1}"),
]


@pytest.mark.parametrize("name", COLLIDING)
def test_no_returned_value_stalls_the_loop(jail: Jail, name: str) -> None:
    code = COLLIDING[name].replace("N", "40000")

    async def run(test: Any) -> tuple[VerifyResponse, float]:
        longest, is_done = 0.0, False

        async def tick() -> None:
            nonlocal longest
            while not is_done:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        ticking = asyncio.create_task(tick())
        request = VerifyRequest(code=code, tests=[test], timeout_s=0.2, output_kb=4096)
        response = await jail.judge.verify(request)
        is_done = True
        await ticking
        return response, longest

    for test in TESTS:
        response, longest = jail.run(run(test))
        assert response.verdict != "pass", response
        assert longest < 3, (test, longest)


LARGE = "def f(x): return [[i, {i, i + 1}] for i in range(60_000)]"
WORDS = "print('1.5 ' * 200_000)"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (LARGE, CallTest(function="f", args=[3], expected=[[1, 2]])),
        (LARGE, AssertTest(code="assert f(3) == [[1, {1, 2}]]")),
        (LARGE, AssertTest(code="assert sorted(map(str, f(3))) == []")),
        (WORDS, StdinTest(input="", output="2.5 " * 200_000)),
        (WORDS, StdinTest(input="", output="1.50 " * 199_999 + "0")),
    ],
)
def test_a_large_value_is_compared_in_a_cell_and_not_in_the_server(
    jail: Jail, code: str, test: Any
) -> None:
    request = VerifyRequest(code=code, tests=[test], timeout_s=4, memory_mb=512, output_kb=4096)
    took_s = []
    for _ in range(2):
        started = time.process_time()
        assert jail.verify(request).verdict == "wrong_answer"
        took_s.append(time.process_time() - started)
    # To decode or to compare these here takes 0.4 s and more, each time; a collection of this
    # process's garbage counts once.
    assert min(took_s) < 0.2


def test_a_large_right_value_passes_whatever_compares_it(jail: Jail) -> None:
    expected = [[i, str(i)] for i in range(20_000)]
    code = "def f(n): return [[i, str(i)] for i in range(n)]\nn = 200_000\nprint('1.5 ' * n)"
    tests = [
        CallTest(function="f", args=[20_000], expected=expected),
        CallTest(function="f", args=[20_000], expected=expected, types="json"),
        AssertTest(code=f"assert f(20_000) == {expected!r}"),
        StdinTest(input="", output="1.50 " * 200_000),
    ]
    for test in tests:
        request = VerifyRequest(code=code, tests=[test], timeout_s=4, output_kb=4096)
        assert jail.verify(request).verdict == "pass"


def test_a_value_that_takes_too_long_to_compare_is_the_programs_fault(jail: Jail) -> None:
    code = "def f(x): return [[i % 7, [i]] for i in range(200_000)]"
    test = CallTest(function="f", args=[3], expected=[0])
    request = VerifyRequest(code=code, tests=[test], timeout_s=0.25, output_kb=8192)
    assert jail.verify(request).verdict in ("timeout", "memory")


ENDLESS = table(__file__, "endless")


def test_a_program_that_never_ends_uses_the_time_of_two_tests_and_not_of_all(jail: Jail) -> None:
    numbers = [0, 1, *range(2, 10)]
    calls = [CallTest(function="f", args=[i], expected=i) for i in numbers]
    streams = [StdinTest(input=f"{i}\n", output=f"{i}") for i in numbers]
    solvers = [AssertTest(code=f"x = f({i})\nassert x == {i}") for i in numbers]
    mixed = [*calls[:4], *streams[4:8], *solvers[8:]]
    for tests in (calls, streams, solvers, mixed):
        before = _cpu_s(jail)
        request = VerifyRequest(
            code=ENDLESS, tests=list(tests), timeout_s=0.5, stop_at_first_failure=False
        )
        response = jail.verify(request)
        found = [str(result.verdict) for result in response.tests]
        assert found == ["pass"] * 2 + ["timeout"] * 8
        assert "used more than 0.5 s" in response.tests[3].message
        assert "not run: 2 tests" in response.tests[4].message
        # A limit that tests share is used up once more.
        assert _cpu_s(jail) - before < 4 * 0.5


def test_a_program_with_one_timeout_runs_all_its_tests(jail: Jail) -> None:
    tests = [CallTest(function="f", args=[i], expected=i) for i in (0, 5, 1, 0)]
    request = VerifyRequest(
        code=ENDLESS, tests=list(tests), timeout_s=0.5, stop_at_first_failure=False
    )
    found = [str(result.verdict) for result in jail.verify(request).tests]
    assert found == ["pass", "timeout", "pass", "pass"]
