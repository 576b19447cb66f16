import asyncio
import math
from collections import defaultdict
from decimal import Decimal
from http import HTTPStatus
from typing import Any

import pytest
from tables import table

from async_rl.core.errors import InfrastructureError
from async_rl.core.programs import OutputRules
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.responses import extract_code, is_right
from async_rl.rewards.text_process import TextProcess
from async_rl.sandbox.comparison import Comparison, Returned, failure
from async_rl.sandbox.values import encode

EXACT = Comparison(relative_tolerance=0)
CONFIGURED = Comparison(relative_tolerance=1e-6)


def test_outputs_count_as_equal_or_not() -> None:
    for is_equal in (True, False):
        for got, expected in table(__file__, "outputs")[is_equal]:
            assert EXACT.outputs_equal(got, expected, OutputRules()) is is_equal, (got, expected)


@pytest.mark.parametrize("case", table(__file__, "tolerances"), ids=str)
def test_a_tolerance_counts_only_where_it_is_asked_for(case: tuple[str, str, set[str]]) -> None:
    got, expected, equal_for = case
    asking = OutputRules(relative_tolerance=1e-6, absolute_tolerance=1e-6)
    found = {
        "nobody": EXACT.outputs_equal(got, expected, OutputRules()),
        "configuration": CONFIGURED.outputs_equal(got, expected, OutputRules()),
        "problem": EXACT.outputs_equal(got, expected, asking),
    }
    assert {who for who, is_equal in found.items() if is_equal} == set(equal_for)


@pytest.mark.parametrize("case", table(__file__, "layouts"), ids=str)
def test_layout_and_case_are_the_problems_choice(case: tuple[str, str, set[str]]) -> None:
    got, expected, passing = case
    rules = {
        "lines": OutputRules(),
        "tokens": OutputRules(layout="tokens"),
        "kattis": OutputRules(layout="tokens", ignores_case=True),
        "exact": OutputRules(layout="exact"),
    }
    found = {name for name, rule in rules.items() if EXACT.outputs_equal(got, expected, rule)}
    assert found == set(passing)


# Value, expected value, the types of tests that take it for right.
VALUES = [
    ((1, 2), [1, 2], "json"), ([(1, 2)], [[1, 2]], "json"), (2, 2.0, "json python"),
    (2.0, 2, "json python"), (True, 1, "python"), (True, 1.0, "python"),
    (10**16 + 1, 1e16, ""), ({"a": (1,)}, {"a": [1]}, "json"), ("2", 2, ""),
    (HTTPStatus.OK, 200, "json python"), ([HTTPStatus.OK], [200], "json python"),
    (defaultdict(list, {"a": [1]}), {"a": [1]}, "json python"), (map(int, "5"), [5], ""),
    (object(), 5, ""), (Decimal(5), 5, "python"), (Decimal("sNaN"), 5, ""), ((1,), [1], "json"),
    (range(3), [0, 1, 2], ""), ({1: 1}, {True: 1}, "python"), ({1}, {1.0}, "python"),
    ([1, 2], [1], ""),
    (math.inf, 1e308, ""), ([math.nan, {"k": (1, 2.0)}], [math.nan, {"k": (1, 2.0)}], "exact"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected", "right"), VALUES)
def test_values_of_other_types_pass_only_where_json_or_python_cannot_tell_them_apart(
    value: object, expected: object, right: str
) -> None:
    body = encode(value)
    kinds = ("exact", "json", "python")
    found = [kind for kind in kinds if not failure(Returned(body, "f", (), expected, kind), 0)]
    assert found == right.split()


def test_tolerance_bounds_the_relative_difference_of_values() -> None:
    for got, expected, passes in (
        (1.0000001, 1.0, True), (1.00001, 1.0, False), (0.1 + 0.2, 0.3, True), (1e-10, 0.0, True),
    ):  # fmt: skip
        assert CONFIGURED.values_equal([got], [expected]) is passes
        assert not EXACT.values_equal([got], [expected])


@pytest.mark.covers("code extraction")
@pytest.mark.parametrize("case", table(__file__, "extraction"), ids=lambda case: case["fact"])
def test_the_program_of_a_response(case: dict[str, Any]) -> None:
    found = extract_code(case["response"], case["mode"], case.get("language", "python"))
    assert found == case["program"]


YES = AnswerTest(rule="exact", expected="yes")
FOREVER = AnswerTest(rule="regex", expected=r"^(a+)+$")
HARD = "a" * 60 + "b"


@pytest.mark.covers("rule by data_source: GSM8K")
@pytest.mark.covers("rule by data_source: MATH")
@pytest.mark.parametrize("case", table(__file__, "answers"), ids=lambda case: case["expected"])
def test_each_rule_takes_its_own_answers_for_right(case: dict[str, Any]) -> None:
    test = AnswerTest(rule=case["rule"], expected=case["expected"])
    answers = [*case["right"], *case["wrong"]]
    assert [text for text in answers if is_right(test, text)] == case["right"]


async def test_a_comparison_that_hangs_fails_or_is_cancelled_leaves_the_next_one_right() -> None:
    answers = TextProcess()
    try:
        assert await answers.verdict(FOREVER, HARD, 0.2) is Verdict.TIMEOUT
        assert await answers.verdict(YES, "yes", 5) is Verdict.PASS
        said = r"could not be compared by rule regex: (?:Pattern)?[Ee]rror: "
        with pytest.raises(InfrastructureError, match=said):
            await answers.verdict(AnswerTest(rule="regex", expected="("), "x", 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await answers.verdict(FOREVER, HARD, 30)
        assert await answers.verdict(YES, "no", 5) is Verdict.WRONG_ANSWER
    finally:
        await answers.close()
