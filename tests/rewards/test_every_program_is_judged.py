"""No program chooses its absence from training: whatever it returns, raises, prints or writes, its
verdict is a score.
"""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewards_support import Jail
from tables import table
from verifier_support import TOKEN, Served, run_config

from async_rl.core.errors import ProtocolError
from async_rl.core.programs import Checker
from async_rl.core.types import AssertTest, CallTest, CodeProblem, CodeTest, StdinTest
from async_rl.rewards.scoring import VerifierClient
from async_rl.rewards.verifier.protocol import TestResult

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


def check_scores(jail: Jail, action: str) -> None:
    code = CLASSES + PROGRAM.format(action)
    results = jail.results(code, TESTS, timeout_s=0.2, output_kb=64)
    assert len(results) == len(TESTS)
    for test, result in zip(TESTS, results, strict=True):
        assert result.verdict.is_score, (test, result, code)


@given(value=VALUES, act=st.sampled_from(ACTS))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_program_gets_a_score(jail: Jail, value: str, act: str) -> None:
    check_scores(jail, act.format(value))


@pytest.mark.parametrize("atom", ATOMS)
def test_every_kind_of_value_gets_a_score(jail: Jail, atom: str) -> None:
    check_scores(jail, f"return {atom}")


async def test_a_test_that_cannot_be_encoded_fails_alone(served: Served) -> None:
    client = VerifierClient(run_config(), TOKEN)
    client.update_servers([served.url])

    async def verify(number: int) -> list[TestResult]:
        problem = CodeProblem(tests=[CallTest(function="f", args=[number], expected=number)])
        return await client.verify(problem, "def f(x): return x")

    try:
        first, wide, last = await asyncio.gather(
            *map(verify, (3, 1 << 70, 4)), return_exceptions=True
        )
    finally:
        await client.close()
    assert isinstance(wide, ProtocolError)
    for found in (first, last):
        assert not isinstance(found, BaseException)
        assert found[0].verdict == "pass"
