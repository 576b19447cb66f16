import os
import select
import signal

import pytest
from rewards_support import Jail, calls
from tables import table

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import CallTest
from async_rl.data.problems import read_problem

PARTLY, STREAM, MIXED, LEAVES, LOOKS = (
    table(__file__, name) for name in ("partly", "stream", "mixed", "leaves", "looks")
)


def test_each_call_has_its_own_verdict_and_the_rest_goes_on(each_jail: Jail) -> None:
    tests = calls(0, 1, 2, 3, 4, 5, 6, 8)
    assert each_jail.verdicts(PARTLY, tests, timeout_s=0.3, output_kb=64) == [
        "pass", "runtime_error", "timeout", "runtime_error", "memory", "output_limit", "pass",
        "wrong_answer",
    ]  # fmt: skip


def test_each_stream_has_its_own_verdict(each_jail: Jail) -> None:
    tests = [(f"{i}\n", str(i)) for i in range(8)]
    assert each_jail.verdicts(STREAM, tests, timeout_s=0.3, output_kb=64) == [
        "pass", "runtime_error", "timeout", "pass", "output_limit", "runtime_error", "pass", "pass",
    ]  # fmt: skip


def test_kinds_may_be_mixed(each_jail: Jail) -> None:
    tests = [*calls(0), ("a", "A"), "assert f(1) == 1", "y = f(2)\nassert y == 2"]
    assert each_jail.verdicts(MIXED, tests) == ["pass"] * 4


def test_programs_leave_nothing_for_the_next_one(each_jail: Jail) -> None:
    assert each_jail.verdicts(LEAVES, calls(0)) == ["pass"]
    assert each_jail.verdicts(LOOKS, calls([False, False, False])) == ["pass"]


@pytest.mark.parametrize("code", ["def f(", "print(1", "\0"])
def test_stream_of_a_program_that_does_not_compile_never_passes_even_if_nothing_is_expected(
    jail: Jail, code: str
) -> None:
    assert jail.verdicts(code, [("", "")] * 2) == ["compile_error"] * 2
    assert jail.verdicts(code, [("", "")]) == ["compile_error"]


def test_what_a_run_changes_does_not_reach_the_next_one(jail: Jail) -> None:
    """A spoilt stream is tried again in a fresh child, and calls do not share arguments."""
    code = "import math\nprint(int(math.sqrt(int(input()))))\nmath.sqrt = None"
    assert jail.verdicts(code, [("9", "3")] * 3) == ["pass"] * 3
    code, shared = "def f(xs):\n    xs.append(3)\n    return len(xs)\n", [2, 1]
    twice = [CallTest(function="f", args=[shared], expected=3)] * 2
    assert jail.verdicts(code, [*twice, *["assert f([2, 1]) == 3"] * 2]) == ["pass"] * 4


@pytest.mark.parametrize("when", ["> 0", "== 0 and os.urandom(1)[0] < 256"])
def test_answer_of_a_stream_is_compared_once(jail: Jail, when: str) -> None:
    """A program that answers otherwise in a fresh process would have two guesses per test."""
    code = table(__file__, "random").replace("<when>", when)
    shown = jail.verdicts(code, [(f"{i}\n", "yes") for i in range(4)])
    assert shown.count("wrong_answer") >= 1
    if when == "> 0":
        assert shown == ["pass", *["wrong_answer"] * 3]


def test_helper_of_a_prompt_is_asked_of_the_prompt_and_not_of_the_program(jail: Jail) -> None:
    row = table(__file__, "row with a helper")
    problem, _ = read_problem(row)
    for code, verdict in (
        (row["prompt"] + "    return -xs[0] / xs[1]", "pass"),
        ("def root(xs): return -xs[0] / xs[1]", "pass"),
        ("def poly(xs, x): return 0\ndef root(xs): return 7", "wrong_answer"),
    ):
        assert jail.verdicts(code, problem.tests, setup=problem.setup) == [verdict], code


def test_a_right_output_above_the_limit_passes_and_a_wrong_one_does_not(jail: Jail) -> None:
    for output, verdict in (("0123456789" * 20_000, "pass"), ("0", "output_limit")):
        test = ("20000", output)
        found = jail.verdicts("print('0123456789' * int(input()))", [test], output_kb=64)
        assert found == [verdict]


def test_environment_is_deterministic(jail: Jail) -> None:
    code = "import time, sys\nd = sys.getdefaultencoding\n"
    code += "def f(x): return [hash('a'), time.tzname[0], d()]"
    first, again = (jail.result(code, test).message for test in calls(None, None))
    assert "'UTC', 'utf-8'" in first
    assert first == again.replace("f(1)", "f(0)")


def test_cell_that_dies_is_replaced_and_the_job_tried_again() -> None:
    jail = Jail(1)
    try:
        (cell,) = jail.cells.alive
        os.kill(cell.pid, signal.SIGKILL)
        # its inner process dies a moment later, and could run the job before that
        closed = select.poll()
        closed.register(cell.host, select.POLLHUP)
        assert closed.poll(10_000), "the socket of a killed cell stayed open"
        assert jail.verdicts("def f(x): return x", calls(0)) == ["pass"]
        assert jail.cells.num_replaced == 1
        jail.run(jail.cells.close())
        with pytest.raises(InfrastructureError, match="no cell could run the program"):
            jail.verdicts("def f(x): return x", calls(0))
    finally:
        jail.close()
