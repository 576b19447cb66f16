"""Programs that pass a test which they do not solve, and tests that are broken themselves."""

from __future__ import annotations

import pytest
from rewards_support import Jail

from async_rl.core.types import AssertTest, CallTest, StdinTest
from async_rl.data.problems import read_problem
from async_rl.rewards.verifier.asserts import calls_of
from async_rl.rewards.verifier.protocol import VerifyRequest, VerifyResponse


def _verify(
    jail: Jail,
    code: str,
    test: str,
    *,
    setup: str = "",
    timeout_s: float = 0.5,
    names: tuple[str, ...] = (),
) -> VerifyResponse:
    tests = [AssertTest(code=test, names=[*names])]
    return jail.verify(VerifyRequest(code=code, tests=[*tests], setup=setup, timeout_s=timeout_s))


JUDGED = "def h(x):\n    return f(x)\nassert h(3) == 9 and f(4) == 16"
_TO_ALL = """
import os, time
def f(x):
    for fd in range(64):
        try: os.write(fd, {frames})
        except OSError: pass
    {then}
"""


def test_tests_of_this_file_are_judged() -> None:
    assert calls_of("", JUDGED, frozenset()) is None


@pytest.mark.parametrize("kind", [b"d", b"p", b"t", b"w", b"l", b"v", b"z"])
@pytest.mark.parametrize("then", ["time.sleep(5)", "os._exit(0)", "return 1", "while True: pass"])
def test_frame_of_a_program_never_settles_a_judged_test(jail: Jail, kind: bytes, then: str) -> None:
    code = _TO_ALL.format(frames=b"0 %s 0 0\n" % kind, then=then)
    assert _verify(jail, code, JUDGED, timeout_s=0.2).verdict in (
        "wrong_answer", "runtime_error", "timeout",
    )  # fmt: skip


_FORGERIES = {
    "at import": (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'-1 l 0 0\\n0 d 0 0\\n0 p 0 0\\n')"
        "\n    except OSError: pass\ndef f(x): return 1"
    ),
    "from a thread": (
        "import os, threading\ndef g():\n    while True: os.write(FD, b'0 p 0 0\\n')\n"
        "FD = [d for d in range(3, 64) if not (lambda d: __import__('contextlib'))(d)] or 4\n"
        "def f(x):\n    raise SystemExit(0)"
    ),
    "patched encoder": (
        "import sys\nfor m in list(sys.modules.values()):\n    for n in ('encode', 'decode',"
        " 'frame', 'describe'):\n        if hasattr(m, n):\n            try: setattr(m, n, lambda"
        " *a, **k: b'9')\n            except (AttributeError, TypeError): pass\ndef f(x): return 1"
    ),
    "patched runner": (
        "import gc, sys\nfrom functools import partial\ndef f(x):\n    frame = sys._getframe(1)\n"
        "    self = frame.f_locals['self']\n    K = type(frame.f_globals['Kind']['DONE'])\n"
        "    self.frame(0, frame.f_globals['Kind'].DONE, 0, b'0')\n    import time;"
        " time.sleep(9)"
    ),
    "trace": (
        "import sys\ndef t(frame, event, arg):\n    if event == 'return': frame.f_locals.clear()\n"
        "    return t\nsys.settrace(t)\nsys.setprofile(lambda *a: None)\ndef f(x): return 1"
    ),
    "stop iteration": "def f(x): raise StopIteration",
    "a kind of stop iteration": "class S(StopIteration): pass\ndef f(x): raise S",
    "assertion": "def f(x): raise AssertionError",
    "broken pipe": "import os\nclass E(BrokenPipeError): pass\ndef f(x): os.closerange(0, 99)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "foreign": "class A:\n    __eq__ = lambda s, o: True\n    __bool__ = lambda s: True\n"
    "    __class__ = int\ndef f(x): return A()",
    "name error": "",
}


@pytest.mark.parametrize("name", _FORGERIES)
@pytest.mark.parametrize(
    "test",
    [
        JUDGED,
        "assert all(map(lambda i: f(i) == i * i, range(2, 5)))",
        "try:\n    assert f(3) == 9\nexcept OSError:\n    pass",
        "try:\n    r = f(3)\nexcept BaseException:\n    r = 9\nassert r == 9 and f(4) == 16",
    ],
    ids=["function", "map", "except OSError", "except BaseException"],
)
def test_judged_test_is_not_passed_by(jail: Jail, name: str, test: str) -> None:
    response = _verify(jail, _FORGERIES[name], test, timeout_s=0.3)
    assert response.verdict in ("wrong_answer", "runtime_error", "timeout"), response


LEAVES = "import os\ndef f(x): os._exit(0)"


@pytest.mark.parametrize("handler", ["except Exception", "except BaseException", "except"])
def test_program_that_dies_fails_also_where_the_test_expects_an_error(
    jail: Jail, handler: str
) -> None:
    test = f"try:\n    f(-1)\n    assert False\n{handler}:\n    pass\n"
    response = _verify(jail, LEAVES, test)
    assert response.verdict == "runtime_error", response
    assert _verify(jail, "", test).verdict == "runtime_error"
    twice = f"for x in 1, 2:\n    try:\n        f(x)\n    {handler}:\n        pass\n"
    assert _verify(jail, LEAVES, twice).verdict == "runtime_error"
    assert _verify(jail, "def f(x): raise ValueError", twice).verdict == "pass"


BUILTINS_LIE = """
def range(*a): return []
def pow(*a): return []
def ord(c): return []
def helper(x): return []
def Counter(x): return []
def isinstance(*a): return True
def f(x): return []
"""
HELPER = "from collections import Counter\nfrom math import *\ndef helper(x): return x * 10"
NAMED_BY_THE_TEST = [
    ("assert f(5) == list(range(5))", "def f(x): return list(range(x))"),
    ("assert f(5) == pow(2, 5)", "def f(x): return 2 ** x"),
    ("assert f(5) == helper(5)", "def f(x): return 10 * x"),
    ("assert f('a') == ord('a')", "def f(x): return ord(x)"),
    ("assert Counter(f('aab')) == Counter('baa')", "def f(x): return list(x)"),
    ("assert isinstance(f(5), int)", "def f(x): return x"),
    ("assert f(5) == sqrt(25) * helper(1)", "def f(x): return 10.0 * x"),
    ("assert f(list(map(ord, 'ab'))) == [97, 98]", "def f(x): return x"),
    ("def range(n): return [n]\nassert f(5) == range(5)", "def f(x): return [x]"),
]


@pytest.mark.parametrize(("test", "right"), NAMED_BY_THE_TEST, ids=lambda text: str(text)[:40])
def test_names_of_a_test_resolve_in_its_own_world(jail: Jail, test: str, right: str) -> None:
    lying = _verify(jail, BUILTINS_LIE, test, setup=HELPER)
    assert lying.verdict in ("wrong_answer", "runtime_error"), lying
    honest = _verify(jail, right, test, setup=HELPER)
    assert honest.verdict == "pass", honest


def test_names_resolve_without_a_judge_too(jail: Jail) -> None:
    """A setup with `import *` is always judged; these tests have none."""
    right = "def f(x): return list(range(x))"
    for test in ("assert f(5) == list(range(5))", "assert f(5) == helper(5)"):
        setup = "def helper(x): return list(range(x))"
        assert _verify(jail, right, test, setup=setup).verdict == "pass"
        assert _verify(jail, BUILTINS_LIE, test, setup=setup).verdict == "wrong_answer"


def test_helper_of_the_test_is_not_the_programs(jail: Jail) -> None:
    assert _verify(jail, "def f(x): return x * x", JUDGED).verdict == "pass"
    lying = "def h(x): return 9\ndef f(x): return 16 if x == 4 else 0"
    assert _verify(jail, lying, JUDGED).verdict == "wrong_answer"


def test_counter_is_known_without_an_import(jail: Jail) -> None:
    test = "assert Counter(f('aab')) == Counter('baa')"
    assert _verify(jail, "def f(x): return list(x)", test).verdict == "pass"
    assert _verify(jail, BUILTINS_LIE, test).verdict == "wrong_answer"


@pytest.mark.parametrize(
    ("test", "setup"),
    [
        ("assert sum(10, 15) == 25", ""),
        ("def check(candidate):\n    for x in range(3):\n        assert candidate(x, 1) == x + 1\n"
        "check(sum)", ""),
        ("assert gcd(3, 4) == 7", "from math import *"),
        ("assert [gcd(x, 4) for x in range(3)] == [4, 5, 6]", "from math import *"),
    ],
)  # fmt: skip
def test_a_name_of_python_or_of_the_setup_is_the_programs_if_the_row_says_so(
    jail: Jail, test: str, setup: str
) -> None:
    right = "def sum(a, b): return a + b\ngcd = sum"
    wrong = "def sum(a, b): return a - b\ngcd = sum"
    for code, verdict in ((right, "pass"), (wrong, "wrong_answer"), ("", "runtime_error")):
        found = _verify(jail, code, test, setup=setup, names=("sum", "gcd"))
        assert found.verdict == verdict, code
        # Otherwise the test does not use the program.
        assert _verify(jail, code, test, setup=setup).verdict == "test_error"


HUMAN_EVAL = {
    "prompt": "def poly(xs, x):\n    return xs[0] + xs[1] * x\ndef root(xs):\n    ...\n",
    "test": "def check(candidate):\n    assert abs(poly([4, 2], candidate([4, 2]))) < 1e-4\n",
    "entry_point": "root",
}


def test_helper_of_a_prompt_is_asked_of_the_prompt_and_not_of_the_program(jail: Jail) -> None:
    problem, _ = read_problem(HUMAN_EVAL)
    for code, verdict in (
        (HUMAN_EVAL["prompt"] + "    return -xs[0] / xs[1]", "pass"),
        ("def root(xs): return -xs[0] / xs[1]", "pass"),
        ("def poly(xs, x): return 0\ndef root(xs): return 7", "wrong_answer"),
    ):
        request = VerifyRequest(code=code, tests=problem.tests, setup=problem.setup)
        assert jail.verify(request).verdict == verdict, code


PYTEST = "def test_three():\n    assert f(3) == 9\ndef test_four():\n    assert f(4) == 16"
UNITTEST = """
import unittest
class TestSquare(unittest.TestCase):
    def setUp(self): self.x = 3
    def test_square(self): self.assertEqual(f(self.x), 9)
    def test_raises(self):
        with self.assertRaises(TypeError): f('a')
if __name__ == '__main__':
    unittest.main()
"""


@pytest.mark.parametrize("test", [PYTEST, UNITTEST, UNITTEST + "\nunittest.main()"])
def test_functions_and_classes_of_tests_are_run(jail: Jail, test: str) -> None:
    assert _verify(jail, "def f(x): return x ** 2", test).verdict == "pass"
    wrong = _verify(jail, "def f(x): return x + 1", test)
    assert wrong.verdict == "wrong_answer", wrong
    assert _verify(jail, "", test).verdict == "runtime_error"


def test_function_is_imported_from_the_solution(jail: Jail) -> None:
    for test in (
        "from solution import f\nassert f(3) == 9",
        "import solution\nassert solution.f(3) == 9",
        "from solution import *\nassert f(3) == 9",
    ):
        assert _verify(jail, "def f(x): return x ** 2", test).verdict == "pass"
        assert _verify(jail, "def f(x): return x", test).verdict == "wrong_answer"


@pytest.mark.parametrize(
    ("test", "setup"),
    [
        ("def check(candidate):\n    assert candidate(3) == 9", ""),
        ("x = 1\nassert x == 1", ""),
        ("if False:\n    assert f(3) == 9", ""),
        ("for i in []:\n    assert f(i) == 9", ""),
        ("pass", ""),
        ("", ""),
        ("def g(): assert f(3) == 9", ""),
        ("assert f(3) ==", ""),
        ("import no_such_module\nassert f(3) == 9", ""),
        ("x = f(3)\nassert x == 9", "import no_such_module"),
        ("x = f(3)\nassert x == 9", "def broken(:"),
        ("x = f(3)\nassert x == 9", "1 / 0"),
        ("x = 1 / 0\nassert f(3) == 9", ""),
        ("x = f(3)\nfrom math import no_such_name", ""),
        ("import sys\nsys.exit(0)\nassert f(3) == 9", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("code", ["def f(x): return x ** 2", "def f(x): return 1", ""])
def test_broken_test_is_the_fault_of_nobody_who_wrote_a_program(
    jail: Jail, test: str, setup: str, code: str
) -> None:
    response = _verify(jail, code, test, setup=setup)
    allowed = {"test_error"} if code else {"test_error", "runtime_error"}
    assert response.verdict in allowed, response


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return '(('", "def h(x): return f(x)\nassert eval(h(3)) == 9"),
        ("def f(x): return 'no_name'", "def h(x): return f(x)\nassert eval(h(3)) == 9"),
        ("def f(x): return 'no_name'", "def h(x): return f(x)\n__import__(h(3))"),
        ("def f(x): return object()", "assert f(f(3)) == 81"),
        ("def f(x): return 1", "x = f(3)\nif x == 1:\n    import no_such_module\nassert x == 9"),
        ("def f(x): return 1", "x = f(3)\nif x == 1:\n    exec('1 +')\nassert x == 9"),
        ("def f(x): return [[[]]]", "x = f(3)\nfor i in range(70):\n    x = [x]\nf(x)"),
        (
            "def f(x): raise ValueError",
            "def h():\n    try: r = f(3)\n    except ValueError: pass\n    assert r == 9\nh()",
        ),
    ],
)  # fmt: skip
def test_program_does_not_make_a_sound_test_a_broken_one(jail: Jail, code: str, test: str) -> None:
    """A broken test is never a score: a program could choose it instead of its failure."""
    assert _verify(jail, code, test).verdict in ("wrong_answer", "runtime_error")


def test_iterator_that_is_an_argument_again_is_passed_as_a_list(jail: Jail) -> None:
    code = "def f(x): return map(str, [x])\ndef g(x): return list(x)"
    assert _verify(jail, code, "assert g(f(3)) == ['3']").verdict == "pass"


RANDOM = """
import os, builtins
n = getattr(builtins, 'n', 0)
builtins.n = n + 1
input()
print('no' if n {when} else 'yes')
"""


@pytest.mark.parametrize("when", ["> 0", "== 0 and {random}"])
def test_answer_of_a_stream_is_compared_once(jail: Jail, when: str) -> None:
    """A program that answers otherwise in a fresh process would have two guesses per test."""
    code = RANDOM.format(when=when.format(random="os.urandom(1)[0] < 256"))
    tests = [StdinTest(input=f"{i}\n", output="yes") for i in range(4)]
    response = jail.verify(VerifyRequest(code=code, tests=list(tests), stop_at_first_failure=False))
    shown = [str(test.verdict) for test in response.tests]
    assert shown.count("wrong_answer") >= 1, response
    if when == "> 0":
        assert shown == ["pass", *["wrong_answer"] * 3]


def test_integer_that_cannot_be_shown_is_a_wrong_answer(jail: Jail) -> None:
    for code in ("def f(x): return 10 ** 5000", "def f(x): return {1: [10 ** 5000]}"):
        tests = [CallTest(function="f", args=[3], expected=9)]
        assert jail.verify(VerifyRequest(code=code, tests=list(tests))).verdict == "wrong_answer"
        assert _verify(jail, code, "assert f(3) == 9").verdict == "wrong_answer"
