from __future__ import annotations

import pytest
from rewards_support import Jail

from async_rl.core.types import AssertTest, CallTest, Verdict
from async_rl.rewards.verifier.asserts import Call, calls_of
from async_rl.rewards.verifier.protocol import VerifyRequest

HUMAN_EVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1, 2]) == 3, "message"
    assert candidate([0.5, 1]) == 1.5
    assert True
check(total)
"""


def calls(code: str, setup: str = "", own: tuple[str, ...] = ()) -> tuple[Call, ...] | None:
    return calls_of(setup, code, frozenset(own))


def test_assertion_of_literals_is_a_call_with_its_expected_value() -> None:
    first, second = calls("assert f((1, 2), -1) == {4, 5}, 'message'\nassert g() == 0.5") or ()
    assert first == ("f", [(1, 2), -1], {4, 5}, "python")
    assert second == ("g", [], 0.5, "python")


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("def total(xs): return sum(xs)", "pass"),
        ("def total(xs): return int(sum(xs))", "wrong_answer"),
        ("class L(int): __eq__ = lambda s, o: True\ndef total(xs): return L()", "wrong_answer"),
    ],
)
def test_asserts_of_a_check_function_are_judged(jail: Jail, code: str, verdict: str) -> None:
    request = VerifyRequest(code=code, tests=[AssertTest(code=HUMAN_EVAL)])
    assert jail.verify(request).verdict == verdict


def test_a_builtin_is_a_call_of_the_program_only_if_the_row_says_so() -> None:
    assert calls("assert sum(10, 15) == 6") is None
    (call,) = calls("assert sum(10, 15) == 6", own=("sum",)) or ()
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
    assert calls(code) is None


def test_a_test_with_a_setup_is_left_to_the_judge() -> None:
    assert calls("assert f(1) == 1", setup="import math") is None


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return str(x)", "assert f(2) == '%d' % 2"),
        ("def f(x): return 1j", "assert f(1) ** 2 == -1"),
        ("def f(x): return 10 ** x", "assert f(100000) == 10 ** 100000"),
        ("def f(x): return 1.4", "assert round(f(1)) == 2"),
        ("def f(x): return 3", "assert math + f(1) == 5"),
    ],
)
def test_an_operator_without_a_bound_and_a_name_of_the_setup_are_left_to_the_judge(
    jail: Jail, code: str, test: str
) -> None:
    tests = [AssertTest(code=test)]
    setup = "def round(x): return int(x) + 1\nmath = 2" if "round" in test or "math" in test else ""
    assert jail.verify(VerifyRequest(code=code, tests=tests, setup=setup)).verdict == "pass"


SOLUTION = """
import collections, sys
def add(a, b=1): return a + b
def count(s): return collections.Counter(s)
def gen(n):
    for i in range(n): yield i
def fail(x): raise ValueError('no')
class P:
    pass
def obj(): return P()
def leave(): sys.exit(0)
"""


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert add(1, 2) == 3", "pass"),
        ("assert add(1) == 3", "wrong_answer"),
        ("assert count('aab') == {'a': 2, 'b': 1}", "pass"),
        ("assert list(gen(3)) == [0, 1, 2]", "pass"),
        ("assert gen(3) == [0, 1, 2]", "wrong_answer"),
        ("assert obj() == obj()", "wrong_answer"),
        ("assert fail(1) == 1", "runtime_error"),
        ("assert leave() == 1", "runtime_error"),
        ("assert missing(1) == 1", "runtime_error"),
        ("assert add(1, 2) < None", "wrong_answer"),
        ("assert max(list(gen(3)), key=abs) == 2", "pass"),
        ("assert count('aab') == {**{'a': 2}, 'b': 1}", "pass"),
        ("assert count('aab') == dict(**{'a': 2}, b=1)", "pass"),
        # in a judge process
        ("x = add(1, 2)\nassert x == 3", "pass"),
        ("assert add(add(1)) == 3", "pass"),
        ("assert all(add(i, i) == 2 * i for i in range(20))", "pass"),
        ("assert all(add(i, i) == i for i in range(20))", "wrong_answer"),
        (
            (
                "try:\n    fail(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) =="
                " 'no'"
            ),
            "pass",
        ),
        ("y = fail(1)", "runtime_error"),
        ("y = leave()", "runtime_error"),
        ("y = obj()\nassert y == 1", "wrong_answer"),
        ("import math\nassert math.isclose(add(1), 2)", "pass"),
        ("assert helper(add(1)) == 4", "pass"),
        ("while True: add(1)", "timeout"),
        ("assert add(lambda: 1) == 1; x = 1", "runtime_error"),
        ("class A: pass\nassert add(A()) == 1", "test_error"),
    ],
)
def test_verdicts_of_assert_tests(jail: Jail, test: str, verdict: str) -> None:
    response = jail.verify(
        VerifyRequest(
            code=SOLUTION,
            tests=[AssertTest(code=test)],
            setup="def helper(x): return 2 * x",
            timeout_s=0.3,
        )
    )
    assert response.verdict == verdict, response


SORTS = "def f(xs):\n    xs.sort()\n    xs.append(0)\n    return xs[:-1]\n"


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert f([2, 1]) == [1, 2]", "pass"),
        ("x = [2, 1]\nassert f(x) == [1, 2]\nassert x == [2, 1]", "pass"),
        ("x = [2, 1]\nassert f(x) == [1, 2] and f(x) == [1, 2] and len(x) == 2", "pass"),
        ("x = [2, 1]\nf(x)\nassert x == [1, 2, 0]", "wrong_answer"),
    ],
)
def test_what_a_program_does_to_its_arguments_changes_nothing_on_the_tests_side(
    jail: Jail, test: str, verdict: str
) -> None:
    assert (
        jail.verify(VerifyRequest(code=SORTS, tests=[AssertTest(code=test)], timeout_s=0.5)).verdict
        == verdict
    )


def test_calls_with_equal_arguments_do_not_share_them(jail: Jail) -> None:
    shared = [2, 1]
    code = "def f(xs):\n    xs.append(3)\n    return len(xs)\n"
    calls = [
        CallTest(function="f", args=[shared], expected=3),
        CallTest(function="f", args=[shared], expected=3),
    ]
    assert jail.verify(VerifyRequest(code=code, tests=list(calls), timeout_s=0.5)).verdict == "pass"
    twice = [AssertTest(code="assert f([2, 1]) == 3")] * 2
    assert jail.verify(VerifyRequest(code=code, tests=list(twice), timeout_s=0.5)).verdict == "pass"


@pytest.mark.parametrize(
    "code",
    [
        "class L(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(x): return L(1)",
        "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): return 1",
        (
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'-1 l 0 0\\n0 d 0 0\\n')\n "
            "   except OSError: pass\ndef f(x): return 1"
        ),
        (
            "import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'0 d 0"
            " 0\\n')\n        except OSError: pass\n    os._exit(0)"
        ),
        (
            "import gc, sys\ndef f(x):\n    return [o for o in gc.get_objects() if isinstance(o,"
            " str) and 'assert' in o and 'h(' in o]"
        ),
        "def f(x): return type('H', (), {'__eq__': lambda s, o: True, '__hash__': None})()",
        "def h(x): return 0\ndef f(x): raise AssertionError",
    ],
)
@pytest.mark.parametrize(
    "test",
    ["assert f(3) == 9", "def h(x):\n    return f(x)\nassert h(3) == 9"],
    ids=["apart", "judge"],
)
def test_assert_test_is_not_fooled(jail: Jail, code: str, test: str) -> None:
    response = jail.verify(VerifyRequest(code=code, tests=[AssertTest(code=test)], timeout_s=0.5))
    assert response.verdict in (Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR), response
