from __future__ import annotations

import pytest

from async_rl.core.assert_tests import Call, asked_by

HUMAN_EVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1, 2]) == 3, "message"
    assert candidate([0.5, 1]) == 1.5
    assert True
check(total)
"""


def calls(code: str, setup: str = "", own: tuple[str, ...] = ()) -> tuple[Call, ...]:
    return asked_by(setup, code, frozenset(own)).calls


def test_assertion_of_literals_is_a_call_with_its_expected_value() -> None:
    first, second = calls("assert f((1, 2), -1) == {4, 5}, 'message'\nassert g() == 0.5")
    assert first == ("f", [(1, 2), -1], {4, 5}, "python")
    assert second == ("g", [], 0.5, "python")


def test_a_builtin_is_a_call_of_the_program_only_if_the_row_says_so() -> None:
    assert calls("assert sum(10, 15) == 6") == ()
    (call,) = calls("assert sum(10, 15) == 6", own=("sum",))
    assert call.function == "sum"


@pytest.mark.parametrize(
    "code",
    [
        "x = f(1)\nassert x == 2", "assert f(f(1)) == 2", "assert all(f(i) for i in range(3))",
        "assert f(lambda x: x) == 1", "assert f(y) == 1", "assert abs(f(1)) == 1",
        "import math\nassert f(1) == 1", "assert f(1).strip() == 'a'", "assert 1 == 1",
        "not python", "assert f(9**9**9) == 1", "assert f([0]*10**9) == 1",
        "assert f(1) == [x for x in 'ab']", "try:\n    f(1)\nexcept ValueError:\n    pass",
        "assert f(*[1]) == 1", "assert f(1/0)", "assert f(**{'k': 1}) == 1", "assert f(1) < 2",
        "f = len\nassert f('a') == 1", "def f(x): return 1\nassert f(1) == 1",
        "assert Counter('a') == 1", "F = 1\nassert F(1) == 1", "assert f(1, k=2) == 3", HUMAN_EVAL,
    ],
)  # fmt: skip
def test_every_other_test_is_left_to_the_judge(code: str) -> None:
    assert calls(code) == ()


def test_a_test_with_a_setup_is_left_to_the_judge() -> None:
    assert calls("assert f(1) == 1", setup="import math") == ()
