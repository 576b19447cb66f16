"""Tests of programs that cannot judge any program are found without running them."""

import pytest
from tables import table

from async_rl.core.assert_tests import asked_by, require_importable, require_usable
from async_rl.core.errors import DataError
from async_rl.core.types import AssertTest, CodeProblem


@pytest.mark.parametrize(("code", "reason"), table(__file__, "broken"))
def test_a_test_that_can_judge_nobody_is_refused_with_the_reason(code: str, reason: str) -> None:
    assert reason in asked_by("", code).fault
    with pytest.raises(DataError, match=r"a test is broken: .*; correct it"):
        require_usable(CodeProblem(tests=[AssertTest(code=code)]))


@pytest.mark.parametrize("kind", ["usable", "pytest"])
def test_a_test_that_asks_the_program_is_usable(kind: str) -> None:
    for code in table(__file__, kind):
        asked = asked_by("", code)
        assert (asked.fault, asked.needs_pytest) == ("", kind == "pytest"), code
        problem = CodeProblem(tests=[AssertTest(code=code)])
        require_usable(problem)
        require_importable(problem, ["pytest"])
        if kind == "pytest":
            with pytest.raises(DataError, match="a test imports pytest"):
                require_importable(problem, [])


def test_a_name_of_a_builtin_is_the_programs_if_the_row_says_so_and_a_setup_compiles() -> None:
    test = AssertTest(code="assert sum(1, 2) == 3", names=["sum", "abs"])
    require_usable(CodeProblem(tests=[test]))
    assert asked_by("", test.code, test.own).names == {"sum"}
    with pytest.raises(DataError, match="does not compile"):
        require_usable(CodeProblem(tests=[test], setup="def broken(:"))


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
