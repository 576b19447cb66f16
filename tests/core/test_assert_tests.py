"""Tests of programs that cannot judge any program are found without running them."""

from __future__ import annotations

import pytest
from tables import table

from async_rl.core.assert_tests import asked_by, require_importable, require_usable
from async_rl.core.errors import DataError
from async_rl.core.types import AssertTest, CodeProblem

PATCH = "from unittest import mock\n"
PYTEST = [
    "def test_a(capsys):\n    assert f(3) == 9",
    "def test_b():\n    assert f(3) == 9\ndef test_a(square):\n    assert square(3) == f(3)",
    "class TestA:\n    def test_a(self, tmp_path):\n        assert f(3) == 9",
    "class TestA:\n    def setup_method(self):\n        self.x = f(3)\n"
    "    def test_a(self):\n        assert self.x == 9",
    "import pytest\n@pytest.mark.parametrize('x', [3])\ndef test_a(x):\n    assert f(x) == 9",
]
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
    ASYNC: "test_a is asynchronous",
    "class TestA:\n    async def test_a(self):\n        assert f(3) == 9": "test_a is asynchronous",
    "import pytest\n@pytest.mark.skip\ndef test_a():\n    assert f(3) == 9": "may not run",
    f"{PATCH}with mock.patch.dict('os.environ', A='1'):\n    f()": "patch.dict is not supported",
    f"{PATCH}with mock.patch('builtins.open', mock.mock_open()):\n    f()": "object of a mock",
    f"{PATCH}with mock.patch('os.stat') as m:\n    m.return_value.x = 1\n    f()": "of a mock",
    f"{PATCH}m = mock.Mock()\nm.get.return_value = 3\nassert f(m) == 9": "object of a mock",
    "def test_a(monkeypatch):\n    monkeypatch.setenv('A', '1')\n    f()": "monkeypatch.setenv",
}
USABLE = table(__file__, "usable")


@pytest.mark.parametrize("code", BROKEN)
def test_a_test_that_can_judge_nobody_is_refused_with_the_reason(code: str) -> None:
    fault = asked_by("", code).fault
    assert BROKEN[code] in fault
    assert bool(fault) is bool(BROKEN[code])
    if fault:
        with pytest.raises(DataError, match=r"a test is broken: .*; correct it"):
            require_usable(CodeProblem(tests=[AssertTest(code=code)]))


@pytest.mark.parametrize("code", [*USABLE, *PYTEST])
def test_a_test_that_asks_the_program_is_usable(code: str) -> None:
    asked = asked_by("", code)
    assert (asked.fault, asked.needs_pytest) == ("", code in PYTEST)
    problem = CodeProblem(tests=[AssertTest(code=code)])
    require_usable(problem)
    require_importable(problem, ["pytest"])
    if code in PYTEST:
        with pytest.raises(DataError, match="a test imports pytest"):
            require_importable(problem, [])


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
