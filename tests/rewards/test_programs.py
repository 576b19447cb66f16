"""The facts of programs.yaml: programs, their tests, and the verdicts that are right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest, CodeTest
from async_rl.rewards.verifier.protocol import VerifyRequest

FACTS = table(__file__, "facts")
FAILS = ("wrong_answer", "runtime_error")


def programs_of(case: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the programs of a case, each with its verdict."""
    codes = case.get("codes", [case["code"]] if "code" in case else [])
    for code in codes.values() if isinstance(codes, dict) else codes:
        yield code, case["verdict"]
    if "right" in case:
        yield case["right"], "pass"
    if "wrong" in case:
        yield case["wrong"], case.get("wrong_is", FAILS)
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
    made: CodeTest = (
        AssertTest(code=test, names=case.get("names", []))
        if isinstance(test, str)
        else msgspec.convert(test, CodeTest)
    )
    request = VerifyRequest(
        code=code,
        tests=[made],
        setup=case.get("setup", ""),
        timeout_s=case.get("timeout_s", 0.5),
        memory_mb=case.get("memory_mb"),
    )
    found = jail.verify(request)
    assert found.verdict in ([verdict] if isinstance(verdict, str) else verdict), found
