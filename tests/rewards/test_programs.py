"""Every program gets the verdict that is right, whatever it returns, raises, prints or writes; none
chooses its absence from training.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewards_support import Jail, calls
from tables import table

from async_rl.core.programs import Checker
from async_rl.core.types import AssertTest, CallTest, CodeTest, StdinTest

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


PARTLY, STREAM, MIXED, LEAVES, LOOKS = (
    table(__file__, name) for name in ("partly", "stream", "mixed", "leaves", "looks")
)


def test_each_call_has_its_own_verdict_and_the_rest_goes_on(each_jail: Jail) -> None:
    tests = calls(0, 1, 2, 3, 4, 5, 6, 8)
    assert each_jail.verdicts(PARTLY, tests, timeout_s=0.3, output_kb=64) == [
        "pass", "runtime_error", "timeout", "runtime_error", "memory", "output_limit", "pass",
        "wrong_answer",
    ]  # fmt: skip


def test_each_stream_has_its_own_verdict(each_jail: Jail) -> None:
    tests = [(f"{i}\n", str(i)) for i in range(8)]
    assert each_jail.verdicts(STREAM, tests, timeout_s=0.3, output_kb=64) == [
        "pass", "runtime_error", "timeout", "pass", "output_limit", "runtime_error", "pass", "pass",
    ]  # fmt: skip


def test_kinds_may_be_mixed(each_jail: Jail) -> None:
    tests = [*calls(0), ("a", "A"), "assert f(1) == 1", "y = f(2)\nassert y == 2"]
    assert each_jail.verdicts(MIXED, tests) == ["pass"] * 4


def test_programs_leave_nothing_for_the_next_one(each_jail: Jail) -> None:
    assert each_jail.verdicts(LEAVES, calls(0)) == ["pass"]
    assert each_jail.verdicts(LOOKS, calls([False, False, False])) == ["pass"]


def test_what_a_run_changes_does_not_reach_the_next_one(jail: Jail) -> None:
    """A spoilt stream is tried again in a fresh child, and calls do not share arguments."""
    code = "import math\nprint(int(math.sqrt(int(input()))))\nmath.sqrt = None"
    assert jail.verdicts(code, [("9", "3")] * 3) == ["pass"] * 3
    code, shared = "def f(xs):\n    xs.append(3)\n    return len(xs)\n", [2, 1]
    twice = [CallTest(function="f", args=[shared], expected=3)] * 2
    assert jail.verdicts(code, [*twice, *["assert f([2, 1]) == 3"] * 2]) == ["pass"] * 4


@pytest.mark.parametrize("when", ["> 0", "== 0 and os.urandom(1)[0] < 256"])
def test_answer_of_a_stream_is_compared_once(jail: Jail, when: str) -> None:
    """A program that answers otherwise in a fresh process would have two guesses per test."""
    code = table(__file__, "random").replace("<when>", when)
    shown = jail.verdicts(code, [(f"{i}\n", "yes") for i in range(4)])
    assert shown.count("wrong_answer") >= 1
    if when == "> 0":
        assert shown == ["pass", *["wrong_answer"] * 3]


def test_a_right_output_above_the_limit_passes_and_a_wrong_one_does_not(jail: Jail) -> None:
    for output, verdict in (("0123456789" * 20_000, "pass"), ("0", "output_limit")):
        test = ("20000", output)
        found = jail.verdicts("print('0123456789' * int(input()))", [test], output_kb=64)
        assert found == [verdict]


def test_environment_is_deterministic(jail: Jail) -> None:
    code = "import time, sys\nd = sys.getdefaultencoding\n"
    code += "def f(x): return [hash('a'), time.tzname[0], d()]"
    first, again = (jail.result(code, test).message for test in calls(None, None))
    assert "'UTC', 'utf-8'" in first
    assert first == again.replace("f(1)", "f(0)")


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
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_program_gets_a_score(jail: Jail, value: str, act: str) -> None:
    check_scores(jail, act.format(value))


@pytest.mark.parametrize("atom", ATOMS)
def test_every_kind_of_value_gets_a_score(jail: Jail, atom: str) -> None:
    check_scores(jail, f"return {atom}")
