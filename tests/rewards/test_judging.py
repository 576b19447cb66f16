from __future__ import annotations

import asyncio
import os
import select
import signal
import types
from collections.abc import Sequence

import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AssertTest, CallTest, StdinTest
from async_rl.examples import run_and_retry
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest


def _verdicts(
    jail: Jail, code: str, tests: list[CallTest | StdinTest | AssertTest], *, stop: bool = False
) -> list[str]:
    request = VerifyRequest(
        code=code, tests=tests, stop_at_first_failure=stop, timeout_s=0.3, output_kb=64
    )
    return [str(test.verdict) for test in jail.verify(request).tests]


def _calls(*expected: object) -> list[CallTest | StdinTest | AssertTest]:
    return [CallTest(function="f", args=[i], expected=value) for i, value in enumerate(expected)]


PARTLY = table(__file__, "partly")


def test_each_call_has_its_own_verdict_and_the_rest_goes_on(jail: Jail) -> None:
    assert _verdicts(jail, PARTLY, _calls(0, 1, 2, 3, 4, 5, 6, 8)) == [
        "pass", "runtime_error", "timeout", "runtime_error", "memory", "output_limit", "pass",
        "wrong_answer",
    ]  # fmt: skip


def test_tests_after_the_first_failure_are_left_unrun(jail: Jail) -> None:
    assert _verdicts(jail, PARTLY, _calls(0, 1, 2, 3), stop=True) == ["pass", "runtime_error"]
    assert _verdicts(jail, "def f(x): return 0", _calls(0, 1, 2, 3), stop=True) == [
        "pass",
        "wrong_answer",
    ]


def test_kinds_may_be_mixed(jail: Jail) -> None:
    code = (
        "import sys\ndef f(x): return x\nif __name__ == '__main__': print(sys.stdin.read().upper())"
    )
    tests = [
        *_calls(0),
        StdinTest(input="a", output="A"),
        AssertTest(code="assert f(1) == 1"),
        AssertTest(code="y = f(2)\nassert y == 2"),
    ]
    assert _verdicts(jail, code, tests) == ["pass"] * 4


STREAM = table(__file__, "stream")


def test_each_stream_has_its_own_verdict(jail: Jail) -> None:
    tests = [StdinTest(input=f"{i}\n", output=str(i)) for i in range(8)]
    assert _verdicts(jail, STREAM, list(tests)) == [
        "pass", "runtime_error", "timeout", "pass", "output_limit", "runtime_error", "pass", "pass",
    ]  # fmt: skip


@pytest.mark.parametrize("code", ["def f(", "print(1", "\0"])
def test_stream_of_a_program_that_does_not_compile_never_passes_even_if_nothing_is_expected(
    jail: Jail, code: str
) -> None:
    tests = [StdinTest(input="", output="")] * 2
    assert _verdicts(jail, code, list(tests)) == ["compile_error"] * 2
    assert _verdicts(jail, code, list(tests[:1])) == ["compile_error"]


def test_stream_spoilt_by_an_earlier_run_is_tried_again_in_a_fresh_child(jail: Jail) -> None:
    code = "import math\nprint(int(math.sqrt(int(input()))))\nmath.sqrt = None"
    assert _verdicts(jail, code, [StdinTest(input="9", output="3")] * 3) == ["pass"] * 3


def test_many_streams_share_children(jail: Jail) -> None:
    tests = [StdinTest(input=f"{i}\n", output=str(i)) for i in range(150)]
    assert _verdicts(jail, "print(int(input()))", list(tests)) == ["pass"] * 150


def test_a_right_output_above_the_limit_passes_and_a_wrong_one_does_not(jail: Jail) -> None:
    code = "print('0123456789' * int(input()))"
    right = StdinTest(input="20000", output="0123456789" * 20_000)
    flood = StdinTest(input="20000", output="0")
    assert _verdicts(jail, code, [right]) == ["pass"]
    assert _verdicts(jail, code, [flood]) == ["output_limit"]


def test_programs_leave_nothing_for_the_next_one(jail: Jail) -> None:
    code = (
        "import os, builtins\ntry:\n    open('/tmp/left', 'w').write('x')\nexcept OSError:"
        " pass\nbuiltins.left = 1\nos.environ['LEFT'] = '1'\ndef f(x): return 0"
    )
    assert _verdicts(jail, code, _calls(0)) == ["pass"]
    code = (
        "import os, builtins\ndef f(x): return [hasattr(builtins, 'left'), 'LEFT' in os.environ,"
        " os.path.exists('/tmp/left')]"
    )
    assert _verdicts(jail, code, _calls([False, False, False])) == ["pass"]


def test_environment_is_deterministic(jail: Jail) -> None:
    code = (
        "import time, sys\ndef f(x): return [hash('a') == HASH, time.tzname[0],"
        " sys.getdefaultencoding()]"
    )
    first = (
        jail.verify(VerifyRequest(code="def f(x): return str(hash('a'))", tests=_calls(None)))
        .tests[0]
        .message.split("returned ")[1]
        .split(",")[0]
    )
    assert _verdicts(
        jail, code.replace("HASH", first.strip("'")), _calls([True, "UTC", "utf-8"])
    ) == ["pass"]


def test_cell_that_dies_is_replaced_and_the_job_tried_again() -> None:
    jail = Jail(1)
    try:
        (cell,) = jail.cells.alive
        os.kill(cell.pid, signal.SIGKILL)
        # its inner process dies a moment later, and could run the job before that
        closed = select.poll()
        closed.register(cell.host, select.POLLHUP)
        assert closed.poll(10_000), "the socket of a killed cell stayed open"
        assert _verdicts(jail, "def f(x): return x", _calls(0)) == ["pass"]
        assert jail.cells.num_replaced == 1
    finally:
        jail.close()


def test_no_cell_at_all_is_an_infrastructure_error_and_never_a_verdict() -> None:
    jail = Jail(1)
    jail.run(jail.cells.close())
    with pytest.raises(InfrastructureError, match="no cell could run the program"):
        jail.verify(VerifyRequest(code="def f(x): return x", tests=_calls(0)))
    jail.close()


def test_fifty_megabytes_of_output_pass_under_a_limit_that_allows_them(jail: Jail) -> None:
    program = (
        "import sys\nline = 'x' * 99 + '\\n'\nfor _ in range(500):\n    sys.stdout.write(line *"
        " 1000)"
    )
    test = StdinTest(input="", output=("x" * 99 + "\n") * 500_000)
    wide = VerifyRequest(code=program, tests=[test], timeout_s=5, output_kb=50_000)
    short = StdinTest(input="", output="x")
    narrow = VerifyRequest(code=program, tests=[short], timeout_s=5, output_kb=40_000)
    assert [str(jail.verify(request).verdict) for request in (wide, narrow)] == [
        "pass",
        "output_limit",
    ]


def test_the_second_prompt_of_the_example_has_the_form_of_its_warm_start(jail: Jail) -> None:
    told: list[str] = []

    class Talk:
        prompt = types.SimpleNamespace(text="double each\n")
        tests = tuple(CallTest(function="f", args=[[n]], expected=[2 * n]) for n in (0, 3))

        async def write(self, *, max_tokens: int) -> str:
            return "def f(xs):\n    return xs"

        async def test(self, program: str, tests: Sequence[CallTest]) -> list[TestResult]:
            request = VerifyRequest(code=program, tests=list(tests))
            return (await asyncio.to_thread(jail.verify, request)).tests

        def tell(self, text: str) -> None:
            told.append(text)

    asyncio.run(run_and_retry.rollout(Talk()))  # type: ignore[arg-type]
    assert told == ["# [3], not [6]\ndouble each\n"]
