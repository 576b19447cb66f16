"""Tests of programs that cannot judge any program are found without running them."""

from __future__ import annotations

import pytest

from async_rl.core.assert_tests import asked_by, require_importable, require_usable
from async_rl.core.errors import DataError
from async_rl.core.types import AssertTest, CodeProblem

FIXTURE = "def test_a(square):\n    assert square(3) == f(3)"
ASYNC = "async def test_a():\n    assert f(3) == 9"
BROKEN = {
    "assert f(3) ==": "does not compile",
    "return f(3)": "does not compile",
    "def check(candidate):\n    assert candidate(3) == 9": "does not use the program",
    "x = 1\nassert x == 1": "does not use the program",
    "assert True": "does not use the program",
    "pass": "does not use the program",
    "": "does not use the program",
    "from math import sqrt\nassert sqrt(4) == 2": "does not use the program",
    "import math\nassert math.sqrt(4) == 2": "does not use the program",
    "assert sum(1, 2) == 3": "does not use the program",
    FIXTURE: "test_a takes arguments",
    f"def test_b():\n    assert f(3) == 9\n{FIXTURE}": "test_a takes arguments",
    ASYNC: "test_a is asynchronous",
    "class TestA:\n    def test_a(self, tmp_path):\n        assert f(3) == 9": "takes arguments",
    "class TestA:\n    def setup_method(self):\n        self.x = f(3)\n"
    "    def test_a(self):\n        assert self.x == 9": "TestA.setup_method would not run",
}
USABLE = [
    "assert f(3) == 9",
    "from solution import f as g\nassert g(3) == 9",
    "import solution\nassert solution.f(3) == 9",
    "def check(candidate):\n    assert candidate(3) == 9\ncheck(f)",
    "def test_all(candidate):\n    assert candidate(3) == 9\ntest_all(f)",
    "def test_three(x=3):\n    assert f(x) == 9",
    "class TestA:\n    def test_a(self):\n        assert f(3) == 9",
    "import unittest\nclass A(unittest.TestCase):\n    def setUp(self):\n        self.x = f(3)\n"
    "    def test_a(self):\n        self.assertEqual(self.x, 9)",
]


@pytest.mark.parametrize("code", BROKEN)
def test_a_test_that_can_judge_nobody_is_refused_with_the_reason(code: str) -> None:
    fault = asked_by("", code).fault
    assert BROKEN[code] in fault
    assert bool(fault) is bool(BROKEN[code])
    if fault:
        with pytest.raises(DataError, match=r"a test is broken: .*; correct it"):
            require_usable(CodeProblem(tests=[AssertTest(code=code)]))


@pytest.mark.parametrize("code", USABLE)
def test_a_test_that_asks_the_program_is_usable(code: str) -> None:
    assert asked_by("", code).fault == ""
    require_usable(CodeProblem(tests=[AssertTest(code=code)]))


def test_a_name_of_a_builtin_is_the_programs_if_the_row_says_so() -> None:
    test = AssertTest(code="assert sum(1, 2) == 3", names=["sum", "abs"])
    require_usable(CodeProblem(tests=[test]))
    assert asked_by("", test.code, test.own).names == {"sum"}


def test_a_setup_that_does_not_compile_is_refused() -> None:
    problem = CodeProblem(tests=[AssertTest(code="assert f(3) == 9")], setup="def broken(:")
    with pytest.raises(DataError, match="does not compile"):
        require_usable(problem)


@pytest.mark.parametrize("module", ["no_such_module", "pytest", "numpy.linalg"])
def test_an_import_that_no_cell_has_is_refused(module: str) -> None:
    for problem in (
        CodeProblem(tests=[AssertTest(code=f"import {module}\nassert f(3) == 9")]),
        CodeProblem(tests=[AssertTest(code="assert f(3)")], setup=f"from {module} import x"),
    ):
        with pytest.raises(DataError, match=r"a test imports .*sandbox\.packages=\['torch'"):
            require_importable(problem, ["torch"])


def test_imports_that_may_be_optional_and_those_of_cells_are_allowed() -> None:
    code = "import math, numpy.linalg, solution\nfrom collections import abc\nassert f(3) == 9"
    optional = "try:\n    import no_such\nexcept ImportError:\n    no_such = None\nassert f() == 1"
    tests = [AssertTest(code=code), AssertTest(code=optional)]
    require_importable(CodeProblem(tests=[*tests]), ["numpy"])
