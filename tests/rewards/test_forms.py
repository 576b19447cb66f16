"""Forms of tests and of programs that public data uses: a right program passes in each, and a wrong
or forging one gets a score that is not a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rewards_support import LIMITS, Jail
from tables import table

from async_rl.config.base import replace
from async_rl.core.types import AssertTest, StdinTest, Verdict
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.protocol import NAMESPACES

FORMS = table(__file__, "forms")


@pytest.fixture(scope="module")
def judge(jail: Jail) -> Iterator[Judge]:
    judge = Judge(jail.cells, replace(LIMITS, packages=["pytest"], memory_mb=512))
    yield judge
    jail.run(judge.close())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_judges_right_and_wrong_programs(jail: Jail, judge: Judge, name: str) -> None:
    form = FORMS[name]
    if "needs_scratch" in form and jail.cells.level != NAMESPACES:
        pytest.skip("this level writes no files")
    test = StdinTest(input="5\n", output="25\n")
    tests = [test if "stdin" in form else AssertTest(code=form["test"])]
    for program in (form["right"], *form["wrong"]):
        request = VerifyRequest(code=program, tests=tests, timeout_s=3)
        response = jail.run(judge.verify(request))
        is_right = program is form["right"]
        assert (response.verdict is Verdict.PASS) is is_right, (program, response.tests)
        assert response.verdict.is_score, (program, response.tests)
