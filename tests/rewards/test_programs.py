import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest

FACTS = table(__file__, "facts")
FAILS = ("wrong_answer", "runtime_error")
_LIMITS = ("setup", "timeout_s", "memory_mb")


def programs_of(case: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the programs of a case, each with its verdict."""
    codes = case.get("codes", [case["code"]] if "code" in case else [])
    for code in codes.values() if isinstance(codes, dict) else codes:
        yield code, case["verdict"]
    if "right" in case:
        yield case["right"], "pass"
    wrong = case.get("wrong", [])
    for code in [wrong] if isinstance(wrong, str) else wrong:
        yield code, case.get("wrong_is", FAILS)
    if "none" in case:
        yield "", case["none"]


def expanded() -> Iterator[Any]:
    for fact in FACTS:
        parts = fact.get("parts", {})
        combinations = itertools.product(*parts.values())
        for row, values in itertools.product(fact.get("cases", [{}]), combinations):
            case = fact | row
            tests = case.get("tests", [case.get("test")])
            for (code, verdict), test in itertools.product(programs_of(case), tests):
                texts = [code, test]
                for name, value in zip(parts, values, strict=True):
                    texts = [
                        each.replace(f"<{name}>", value) if isinstance(each, str) else each
                        for each in texts
                    ]
                yield pytest.param(case, *texts, verdict, id=case.get("name", fact["fact"]))


@pytest.mark.parametrize(("case", "code", "test", "verdict"), list(expanded()))
def test_a_program_gets_the_verdict_that_is_right(
    jail: Jail, case: dict[str, Any], code: str, test: Any, verdict: Any
) -> None:
    if isinstance(test, str):
        test = AssertTest(code=test, names=case.get("names", []))
    found = jail.result(code, test, **{name: case[name] for name in _LIMITS if name in case})
    assert found.verdict in ([verdict] if isinstance(verdict, str) else verdict), found
    assert case.get("says", "") in found.message, found
