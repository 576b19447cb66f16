"""No program chooses its absence from training: whatever it returns, raises, prints or writes, its
verdict is a score.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewards_support import Jail
from tables import table
from verifier_support import TOKEN, run_config, verifier

from async_rl.core.errors import ProtocolError
from async_rl.core.programs import Checker
from async_rl.core.types import AssertTest, CallTest, CodeProblem, CodeTest, StdinTest
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import VerifyRequest

CLASSES = table(__file__, "classes")
ATOMS = table(__file__, "atoms")
FORMS = table(__file__, "forms")
ACTS = table(__file__, "acts")
PROGRAM = table(__file__, "program")
CHECKER = "import sys\nn = int(sys.stdin.read())\nsys.exit(42 if n == 9 else 43)"
INTERACTOR = "print(3, flush=True)\n" + CHECKER
ASSERTS = table(__file__, "asserts")
TESTS: list[CodeTest] = [
    CallTest(function="f", args=[3], expected=9),
    CallTest(function="f", args=[3], expected={"a": [9]}, types="json"),
    CallTest(function="f", args=[3], expected={"1": 9.5}),
    StdinTest(input="3", output="9"),
    StdinTest(input="3", output="9", checker=Checker(code=CHECKER, form="kattis")),
    StdinTest(
        input="3", output="9", checker=Checker(code=INTERACTOR, form="kattis", interacts=True)
    ),
    *(AssertTest(code=code) for code in ASSERTS),
]
VALUES = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.builds(lambda form, value: form.format(value), st.sampled_from(FORMS), inner),
    max_leaves=3,
)


@given(value=VALUES, act=st.sampled_from(ACTS))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_program_gets_a_score(jail: Jail, value: str, act: str) -> None:
    code = CLASSES + PROGRAM.format(act.format(value))
    request = VerifyRequest(
        code=code, tests=TESTS, timeout_s=0.5, output_kb=64, stop_at_first_failure=False
    )
    results = jail.verify(request).tests
    assert len(results) == len(TESTS)
    for test, result in zip(TESTS, results, strict=True):
        assert result.verdict.is_score, (test, result, code)


@pytest.mark.parametrize("atom", ATOMS)
def test_every_kind_of_value_gets_a_score(jail: Jail, atom: str) -> None:
    for value in (atom, f"{{{atom}: 2}}" if "[" not in atom else f"[{atom}]"):
        code = CLASSES + PROGRAM.format(f"return {value}")
        request = VerifyRequest(
            code=code, tests=TESTS, timeout_s=0.5, output_kb=64, stop_at_first_failure=False
        )
        for test, result in zip(TESTS, jail.verify(request).tests, strict=True):
            assert result.verdict.is_score, (test, result)


async def test_a_test_that_cannot_be_encoded_fails_alone() -> None:
    async with verifier() as (url, _):
        client = VerifierClient(run_config(), TOKEN)
        client.update_servers([url])
        try:
            results = await asyncio.gather(
                *(
                    client.verify(CodeProblem(tests=[_call(number)]), "def f(x): return x")
                    for number in (3, 1 << 70, 4)
                ),
                return_exceptions=True,
            )
        finally:
            await client.close()
    first, wide, last = results
    assert isinstance(wide, ProtocolError)
    assert [found[0].verdict for found in (first, last)] == ["pass", "pass"]


def _call(number: int) -> CallTest:
    return CallTest(function="f", args=[number], expected=number)
