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

from async_rl.core.types import CallTest

ORACLE, FORMS, FRAMES = (table(__file__, name) for name in ("oracle", "forms", "frames"))
ATOMS = ("x", "1", "2", "7", "-3", "0")


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(ATOMS)
    return rng.choice(FORMS).format(a=_expression(rng, depth - 1), b=_expression(rng, depth - 1))


def _value(code: str, argument: int) -> Any:
    space: dict[str, Any] = {}
    exec(code, space)
    try:
        return space["f"](argument)
    except (ArithmeticError, LookupError, ValueError, TypeError):
        return 5


def _test(kind: str, argument: int, value: Any) -> Any:
    if kind == "stdin":
        return f"{argument}\n", value
    if kind == "call":
        return CallTest(function="f", args=[argument], expected=value)
    return f"assert f({argument}) == {value!r}"


@pytest.mark.slow
@given(seed=st.integers(0, 10**9), kind=st.sampled_from(["call", "stdin", "assert"]))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_verdicts_equal_those_of_a_slow_trusted_run(jail: Jail, seed: int, kind: str) -> None:
    rng = random.Random(seed)
    code = rng.choice(FRAMES).format(e=_expression(rng, 3))
    other = "def f(x):\n    return " + _expression(rng, 2)
    tests = []
    for argument in rng.sample(range(12), 5):
        value = _value(other if rng.random() < 0.5 or "broken" in code else code, argument)
        tests.append((kind, argument, str(value) if kind == "stdin" else value))
    if kind == "stdin":
        code += "print(f(int(input())))\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ORACLE], input=json.dumps([code, tests]),
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = jail.verdicts(code, [_test(*test) for test in tests])
    assert found == json.loads(done.stdout), (code, tests, found)
