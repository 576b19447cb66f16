"""Random programs on random tests: the verifier's verdict is that of a slow, separate run that
trusts the program.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest, CallTest, StdinTest
from async_rl.rewards.verifier.protocol import VerifyRequest

ORACLE = table(__file__, "oracle")
ATOMS = ("x", "1", "2", "7", "-3", "0")
FORMS = table(__file__, "forms")
FRAMES = table(__file__, "frames")


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(ATOMS)
    return rng.choice(FORMS).format(a=_expression(rng, depth - 1), b=_expression(rng, depth - 1))


def _trusted(code: str, tests: list[tuple[str, int, Any]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ORACLE],
        input=json.dumps([code, tests]),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    answers: list[str] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), kind=st.sampled_from(["call", "stdin", "assert"]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_verdicts_equal_those_of_a_slow_trusted_run(jail: Jail, seed: int, kind: str) -> None:
    rng = random.Random(seed)
    code = rng.choice(FRAMES).format(e=_expression(rng, 3))
    if kind == "stdin":
        code += "print(f(int(input())))\n"
    right = "def f(x):\n    return " + _expression(rng, 2)
    expected: list[Any] = []
    inputs = rng.sample(range(12), 5)
    for argument in inputs:
        space: dict[str, Any] = {}
        exec(
            code if rng.random() < 0.5 and kind != "stdin" and "broken" not in code else right,
            space,
        )
        try:
            value = space["f"](argument)
        except (ArithmeticError, LookupError, ValueError, TypeError):
            value = 5
        expected.append(str(value) if kind == "stdin" else value)
    tests = [(kind, argument, value) for argument, value in zip(inputs, expected, strict=True)]
    made: list[Any] = [
        (
            CallTest(function="f", args=[argument], expected=value)
            if kind == "call"
            else (
                StdinTest(input=f"{argument}\n", output=value)
                if kind == "stdin"
                else AssertTest(code=f"assert f({argument}) == {value!r}")
            )
        )
        for _, argument, value in tests
    ]

    got = jail.verify(VerifyRequest(code=code, tests=made, stop_at_first_failure=False)).tests

    assert [str(test.verdict) for test in got] == _trusted(code, tests), (code, tests, got)
