import time
from typing import Any

import psutil
import pytest
from rewards_support import Jail, calls
from tables import table

from async_rl.core.types import CallTest

SLEEPERS, CLOCK, CALL_CLOCK, SLOW, COLLIDING, ENDLESS = (
    table(__file__, name)
    for name in ("sleepers", "clock", "call clock", "slow", "colliding", "endless")
)


def _cpu_s(jail: Jail) -> float:
    """CPU time of all programs that have run in this jail."""
    cells = [psutil.Process(cell.pid) for cell in jail.cells.alive]
    processes = [process for outer in cells for process in (outer, *outer.children())]
    times = [process.cpu_times() for process in processes]
    return sum(time.children_user + time.children_system for time in times)


@pytest.mark.parametrize("name", SLEEPERS)
def test_sleeper_in_short_pieces_is_a_timeout_within_a_small_multiple_of_its_limit(
    jail: Jail, name: str
) -> None:
    started = time.monotonic()
    tests = [CallTest(function="f", args=[3], expected=9), "y = f(3)\nassert y == 9"]
    # Which of the two depends on the sleeper: each is watched in a way of its own.
    result = jail.result(SLEEPERS[name], tests[list(SLEEPERS).index(name) % 2], timeout_s=0.2)
    assert result.verdict == "timeout", result
    # 0.2 s of CPU time and 1.2 s of sleep are allowed; tests share a busy machine.
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("trick", table(__file__, "tricks"))
def test_stream_cannot_reset_its_clock_through_the_result_file(jail: Jail, trick: str) -> None:
    tests = [(f"{i}\n", f"{i}") for i in range(4)]
    code = CLOCK.format(seconds=0.9, trick=trick)
    before = _cpu_s(jail)
    found = jail.verdicts(code, tests, timeout_s=0.3, stop_at_first_failure=True)
    assert found[-1] != "pass"
    assert _cpu_s(jail) - before < 0.9  # the limit once together and once alone, or less


def test_call_cannot_reset_its_clock_either(jail: Jail) -> None:
    tests = calls(0, 1, 2, 3)
    found = jail.verdicts(CALL_CLOCK, tests, timeout_s=0.3, stop_at_first_failure=True)
    assert found[-1] != "pass"


def test_tests_that_exceed_the_limit_together_pass_one_by_one(jail: Jail) -> None:
    streams = [(f"{i}\n", f"{i}") for i in range(4)]
    for tests in (streams, calls(0, 1, 2, 3), ["assert f(1) == 1 and f(2) == 2"] * 2):
        assert jail.verdicts(SLOW, tests, timeout_s=0.8) == ["pass"] * len(tests)
    both = "assert f(1) == 1 and f(2) == 2 and f(3) == 3 and f(4) == 4"
    assert jail.verdicts(SLOW, [both], timeout_s=0.8) == ["timeout"]


TESTS: list[Any] = [CallTest(function="f", args=[3], expected=[1]), *table(__file__, "reading")]


@pytest.mark.parametrize("name", COLLIDING)
def test_no_returned_value_stalls_the_loop(jail: Jail, name: str) -> None:
    code = COLLIDING[name].replace("N", "40000")
    for test in TESTS:
        started = time.process_time()
        found = jail.result(code, test, timeout_s=0.2, output_kb=4096)
        assert found.verdict != "pass", found
        # What is computed in this process holds up every other program.
        assert time.process_time() - started < 3, test


LARGE = "def f(x): return [[i, {i, i + 1}] for i in range(60_000)]"
WORDS = "print('1.5 ' * 200_000)"


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (LARGE, CallTest(function="f", args=[3], expected=[[1, 2]])),
        (LARGE, "assert sorted(map(str, f(3))) == []"),
        (WORDS, ("", "1.50 " * 199_999 + "0")),
    ],
)
def test_a_large_value_is_compared_in_a_cell_and_not_in_the_server(
    jail: Jail, code: str, test: Any
) -> None:
    took_s = []
    for _ in range(2):
        started = time.process_time()
        found = jail.verdicts(code, [test], timeout_s=4, memory_mb=512, output_kb=4096)
        assert found == ["wrong_answer"]
        took_s.append(time.process_time() - started)
    # To decode or to compare these here takes 0.4 s and more, each time; a collection of this
    # process's garbage counts once.
    assert min(took_s) < 0.2


def test_a_large_right_value_passes_whatever_compares_it(jail: Jail) -> None:
    expected = [[i, str(i)] for i in range(20_000)]
    code = "def f(n): return [[i, str(i)] for i in range(n)]\nn = 200_000\nprint('1.5 ' * n)"
    for test in (
        CallTest(function="f", args=[20_000], expected=expected, types="json"),
        f"assert f(20_000) == {expected!r}",
        ("", "1.50 " * 200_000),
    ):
        assert jail.verdicts(code, [test], timeout_s=4, output_kb=4096) == ["pass"]


def test_a_value_that_takes_too_long_to_compare_is_the_programs_fault(jail: Jail) -> None:
    code = "def f(x): return [[i % 7, [i]] for i in range(200_000)]"
    (found,) = jail.verdicts(code, calls([0]), timeout_s=0.25, output_kb=8192)
    assert found in ("timeout", "memory")


@pytest.mark.parametrize("kind", ["calls", "streams", "solvers", "mixed"])
def test_a_program_that_never_ends_uses_the_time_of_two_tests_and_not_of_all(
    jail: Jail, kind: str
) -> None:
    numbers = range(10)
    tests: dict[str, list[Any]] = {
        "calls": calls(*numbers),
        "streams": [(f"{i}\n", f"{i}") for i in numbers],
        "solvers": [f"x = f({i})\nassert x == {i}" for i in numbers],
    }
    tests["mixed"] = [*tests["calls"][:4], *tests["streams"][4:8], *tests["solvers"][8:]]
    before = _cpu_s(jail)
    results = jail.results(ENDLESS, tests[kind], timeout_s=0.3)
    assert [str(result.verdict) for result in results] == ["pass"] * 2 + ["timeout"] * 8
    assert "used more than 0.3 s" in results[3].message
    assert "not run: 2 tests" in results[4].message
    # A limit that tests share is used up once more.
    assert _cpu_s(jail) - before < 4 * 0.3
    if kind == "calls":
        # After one timeout the other tests run.
        found = jail.verdicts(ENDLESS, [tests[kind][i] for i in (0, 5, 1, 0)], timeout_s=0.3)
        assert found == ["pass", "timeout", "pass", "pass"]
