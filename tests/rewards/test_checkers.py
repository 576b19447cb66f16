"""Facts about the configurable parts of the comparison: float tolerance and checker functions."""

from __future__ import annotations

import asyncio

import pytest
from rewards_support import LIMITS

from async_rl.config.base import replace
from async_rl.core.errors import ConfigError, InfrastructureError
from async_rl.core.types import CallTest, StdinTest
from async_rl.rewards.verifier.comparison import Comparison, load_checker
from async_rl.rewards.verifier.judging import Judge
from async_rl.rewards.verifier.protocol import VerifyRequest
from async_rl.sandbox.warm_cells import WarmCells

CODE = "def f(x):\n    return x\nif __name__ == '__main__':\n    print(input())"
IN_ORDER = [
    CallTest(function="f", args=[[1, 2]], expected=[1, 2]),
    StdinTest(input="1 2", output="1 2"),
]
OUT_OF_ORDER = [
    CallTest(function="f", args=[[1, 2]], expected=[2, 1]),
    StdinTest(input="1 2", output="2 1"),
]
ANYTHING = [CallTest(function="f", args=[[1, 2]], expected=None), StdinTest(input="1 2", output="")]


def verdicts(checker: str | None, tests: list[CallTest | StdinTest]) -> list[str]:
    async def run() -> list[str]:
        async with await WarmCells.start(1) as cells:
            judge = Judge(cells, replace(LIMITS, checker=checker))
            return [
                str(test.verdict)
                for test in (
                    await judge.verify(
                        VerifyRequest(code=CODE, tests=list(tests), stop_at_first_failure=False)
                    )
                ).tests
            ]

    return asyncio.run(run())


def test_checker_decides_instead_of_the_built_in_comparison() -> None:
    assert verdicts(None, IN_ORDER) == ["pass", "pass"]
    assert verdicts(None, OUT_OF_ORDER) == ["wrong_answer", "wrong_answer"]
    assert verdicts("checkers_for_tests:any_order", OUT_OF_ORDER) == ["pass", "pass"]
    assert verdicts("checkers_for_tests:any_order", [StdinTest(input="1 2", output="1 3")]) == [
        "wrong_answer"
    ]


def test_checker_sees_what_the_program_was_given() -> None:
    assert verdicts("checkers_for_tests:echoes_the_input", [ANYTHING[1]]) == ["pass"]
    assert verdicts("checkers_for_tests:echoes_the_input", [ANYTHING[0]]) == ["wrong_answer"]


@pytest.mark.parametrize(
    ("checker", "said"),
    [("broken", "raised ValueError: no idea"), ("vague", "returned 1, not True or False")],
)
def test_checker_that_fails_is_an_infrastructure_error_and_no_verdict(
    checker: str, said: str
) -> None:
    with pytest.raises(InfrastructureError, match=said):
        verdicts(f"checkers_for_tests:{checker}", IN_ORDER)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("math:nothing", "has no nothing"),
        ("math:pi", "is a float"),
    ],
)
def test_checker_that_cannot_be_had_is_refused_at_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"sandbox.checker={name}: .*{said}"):
        load_checker(name)


@pytest.mark.parametrize(("tolerance", "got", "expected", "passes"), [
    (1e-9, 1.0000001, 1.0, False), (1e-6, 1.0000001, 1.0, True), (1e-6, 1.00001, 1.0, False),
    (0.0, 0.1 + 0.2, 0.3, False), (1e-9, 0.1 + 0.2, 0.3, True),
    (1e-6, 1e-10, 0.0, True), (0.0, 1e-300, 0.0, False),
])  # fmt: skip
def test_tolerance_bounds_the_relative_difference(
    tolerance: float, got: float, expected: float, passes: bool
) -> None:
    comparison = Comparison(relative_tolerance=tolerance, checker=None)
    assert comparison.values_equal([got], [expected]) is passes
    assert expected == 0.0 or comparison.outputs_equal(f"x {got!r}", f"x {expected!r}") is passes
