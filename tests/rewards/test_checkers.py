"""Facts about the parts of the comparison that a person chooses: the float tolerance, and the
checker programs of rows.
"""

from __future__ import annotations

import msgspec
import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.errors import DataError
from async_rl.core.programs import Checker, OutputRules
from async_rl.core.types import StdinTest, Verdict
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.protocol import TestResult, VerifyRequest
from async_rl.sandbox.comparison import Comparison


@pytest.mark.parametrize(("tolerance", "got", "expected", "passes"), [
    (1e-9, 1.0000001, 1.0, False), (1e-6, 1.0000001, 1.0, True), (1e-6, 1.00001, 1.0, False),
    (0.0, 0.1 + 0.2, 0.3, False), (1e-9, 0.1 + 0.2, 0.3, True),
    (1e-6, 1e-10, 0.0, True), (0.0, 1e-300, 0.0, False),
])  # fmt: skip
def test_tolerance_bounds_the_relative_difference(
    tolerance: float, got: float, expected: float, passes: bool
) -> None:
    comparison = Comparison(relative_tolerance=tolerance)
    assert comparison.values_equal([got], [expected]) is passes
    assert (
        expected == 0.0
        or comparison.outputs_equal(f"x {got!r}", f"x {expected!r}", OutputRules()) is passes
    )


KATTIS = table(__file__, "kattis")
TESTLIB = table(__file__, "testlib")
CHECKERS = [Checker(code=KATTIS, form="kattis"), Checker(code=TESTLIB, form="testlib")]


def checked(jail: Jail, program: str, checker: Checker, *, output: str = "2") -> TestResult:
    test = StdinTest(input="10\n", output=output, checker=checker)
    return jail.verify(VerifyRequest(code=program, tests=[test], timeout_s=0.5)).tests[0]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.form)
def test_program_of_a_row_decides_about_an_output(jail: Jail, checker: Checker) -> None:
    assert checked(jail, "print(4, 6)", checker).verdict is Verdict.PASS
    assert checked(jail, "print(7)\nprint(3)", checker).verdict is Verdict.PASS
    assert checked(jail, "print(5, 6)", checker).verdict is Verdict.WRONG_ANSWER
    assert checked(jail, "print(2, 3, 5)", checker).verdict is Verdict.WRONG_ANSWER
    assert checked(jail, "print(2)", checker).verdict is Verdict.WRONG_ANSWER
    assert checked(jail, "print('x')", checker).verdict is Verdict.WRONG_ANSWER
    assert checked(jail, "import os\nos.write(1, b'\\xff')", checker).verdict is (
        Verdict.WRONG_ANSWER
    )
    assert checked(jail, "print(1 // 0)", checker).verdict is Verdict.RUNTIME_ERROR


def test_the_message_of_a_checker_is_reported(jail: Jail) -> None:
    assert checked(jail, "print('x')", CHECKERS[0]).message == "not numbers"
    assert checked(jail, "print(1)", CHECKERS[1]).message == "wrong answer: sum"


FAILING = table(__file__, "failing")


@pytest.mark.parametrize("name", FAILING)
def test_an_output_on_which_the_checker_of_a_row_fails_is_rejected(jail: Jail, name: str) -> None:
    found = checked(jail, "print(4, 6)", Checker(code=FAILING[name], form="kattis"))
    assert found.verdict is Verdict.WRONG_ANSWER, found
    assert found.message, found


def test_a_checker_that_does_not_compile_is_a_test_error(jail: Jail) -> None:
    found = checked(jail, "print(4, 6)", Checker(code="does not compile (", form="kattis"))
    assert found.verdict is Verdict.TEST_ERROR, found


@pytest.mark.parametrize("output", ["abc", "", "9" * 5_000, "4 6 x"])
def test_no_output_makes_the_checker_the_fault(jail: Jail, output: str) -> None:
    code = "import sys\nn = int(sys.stdin.read())\nsys.exit(42 if n == 9 else 43)"
    for answer in ("9", ""):
        checker = Checker(code=code, form="kattis")
        found = checked(jail, f"print('{output}')", checker, output=answer)
        assert found.verdict is Verdict.WRONG_ANSWER, found


def test_a_large_output_is_checked_too(jail: Jail) -> None:
    lines = "import sys\nsys.exit(42 if sum(map(int, sys.stdin)) == 30000 else 43)"
    checker = Checker(code=lines, form="kattis")
    ones = "print('1\\n' * {}, end='')"
    assert checked(jail, ones.format(30_000), checker, output="").verdict is Verdict.PASS
    assert checked(jail, ones.format(29_999), checker).verdict is Verdict.WRONG_ANSWER


def test_a_column_of_a_row_names_the_checker() -> None:
    pairs = {"inputs": ["10\n", "9\n"], "outputs": ["2", "1"]}
    for given in ({"code": TESTLIB, "form": "testlib"}, CHECKERS[1]):
        text = msgspec.json.encode(given).decode()
        problem, _ = read_problem({"input_output": pairs, "checker": text})
        assert [test.checker for test in problem.tests] == [CHECKERS[1]] * 2  # type: ignore[union-attr]
    for wrong in ({"code": "x ="}, {"code": "x =", "form": "kattis"}, "[]"):
        with pytest.raises(DataError, match=r"column checker (is|does) not"):
            read_problem({"input_output": pairs, "checker": wrong})
