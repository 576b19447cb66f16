"""No program chooses its absence from training: whatever it returns, raises, prints or writes, its
verdict is a score.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewards_support import Jail
from verifier_support import TOKEN, run_config, verifier

from async_rl.core.errors import ProtocolError
from async_rl.core.output_rules import Checker
from async_rl.core.types import AssertTest, CallTest, CodeTest, StdinTest
from async_rl.rewards.verifier.client import VerifierClient
from async_rl.rewards.verifier.protocol import VerifyRequest

CLASSES = """
import builtins, datetime, decimal, enum, fractions, os, sys
class L(list): __hash__ = object.__hash__
class I(int):
    __hash__ = None
    def __index__(self): raise OSError
class S(str):
    def __str__(self): return 5
class D(dict):
    def items(self): raise ValueError
class N(float): pass
class M(type):
    def __subclasscheck__(cls, other): raise RuntimeError
    __instancecheck__ = __eq__ = __subclasscheck__
    __hash__ = lambda cls: 0
class O(metaclass=M):
    __slots__ = ()
    def __getattribute__(self, name): raise NameError(name)
class T(tuple): __iter__ = None
class E(Exception):
    def __str__(self): return [] if os else ''
class Q(ImportError, StopAsyncIteration): pass
"""
ATOMS = [
    "L([1])", "I(3)", "S('x')", "D(a=1)", "N('nan')", "O()", "O", "M", "T((1,))", "E", "E('x')",
    "Q",
    "9", "None", "True", "2**64", "-2**70", "10**5000", "float('inf')", "'\\ud800'", "'x' * 70_000",
    "decimal.Decimal('sNaN')", "decimal.Decimal('1e999999')", "fractions.Fraction(10**400, 3)",
    "range(10**30)", "iter(int, 1)", "object()", "sys", "os", "f", "f.__code__", "type", "b'\\xff'",
    "(i for i in ())", "datetime.timedelta.max", "NotImplemented", "Ellipsis", "complex('nan')",
    "memoryview(b'x')", "bytearray(9)", "enum.Enum('C', 'a').a", "slice(1)", "{}.items()",
    "(lambda *a: f(*a))", "'no_such_name'", "'(('", "b'1' * 9", "builtins.__import__", "{I: 1}",
]  # fmt: skip
FORMS = [
    "[{}]", "({},)", "{{1: {}}}", "{{{}: 2}}", "{{{}}}", "frozenset([{}])", "[[[[{}]]]]", "L([{}])",
    "D(a={})", "iter([{}])", "deep({})", "[{}] * 2000",
]  # fmt: skip
ACTS = [
    "return {}", "raise ValueError({})", "raise E({})", "raise Q", "raise KeyboardInterrupt",
    "raise SystemExit({})", "yield {}", "os._exit(3)", "raise StopIteration", "raise MemoryError",
    "os.close(3); return {}", "sys.modules.clear(); return {}", "return {} if x == 3 else f",
    "for d in range(3, 20):\n        try: os.write(d, b'0 k 0 [1,2,3]\\n0 t 0 0\\n')\n"
    "        except OSError: pass\n    return {}",
    "for d in range(3, 20):\n        try: os.write(d, b'0 v 0 {{\"o\":[9,[[]]]}}\\n')\n"
    "        except OSError: pass\n    return {}",
]  # fmt: skip
PROGRAM = """
def deep(x):
    for _ in range(59): x = [x]
    return x
def f(x):
    {}
if __name__ == '__main__':
    print(f(3) if x else 0)
"""
CHECKER = "import sys\nn = int(sys.stdin.read())\nsys.exit(42 if n == 9 else 43)"
ASSERTS = [
    "assert f(3) == 9", "x = f(3)\nassert x == 9", "assert f(f(3)) == 9", "assert f(3)(3) == 9",
    "assert abs(f(3) - 9) < 1 and eval(f(3)) == 9", "for y in f(3): assert y == 9\nassert f(3)[0]",
    "assert str(f(3)) == '9'", "assert hash(f(3)) == 9 and {f(3): 1}", "import copy, json\n"
    "assert json.dumps(copy.deepcopy(f(3))) == '9'", "assert sorted(f(3), key=f) == [9]",
    "try:\n    r = f(3)\nexcept Exception as e:\n    r = __import__(str(e))\nassert r == 9",
    "assert f(lambda x: 1 / 0) == 9", "assert isinstance(3, f(3)) and f(3).f.f", "raise f(3)",
    "from solution import E, f\ntry: f(3)\nexcept E: pass\nassert f(3) == 9", "exec(f(3))",
    "import asyncio\nassert asyncio.run(f(3)) == 9", "with f(3) as g: assert g == 9",
    "assert f(3) in [9] or 9 in f(3) or f(3) in f(3)", "class A(f(3)): pass\nassert A().x == 9",
    "def test_it():\n    assert f(3) == 9", "assert len(f(3)) == int(f(3)) == 9",
]  # fmt: skip
TESTS: list[CodeTest] = [
    CallTest(function="f", args=[3], expected=9),
    CallTest(function="f", args=[3], expected={"a": [9]}, types="json"),
    CallTest(function="f", args=[3], expected={"1": 9.5}),
    StdinTest(input="3", output="9"),
    StdinTest(input="3", output="9", checker=Checker(code=CHECKER, form="kattis")),
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


def test_a_test_that_cannot_be_encoded_fails_alone() -> None:
    async def run() -> None:
        async with verifier() as (url, _):
            client = VerifierClient(run_config(), TOKEN)
            client.update_servers([url])
            try:
                results = await asyncio.gather(
                    *(
                        client.check("def f(x): return x", [_call(number)])
                        for number in (3, 1 << 70, 4)
                    ),
                    return_exceptions=True,
                )
            finally:
                await client.close()
        first, wide, last = results
        assert isinstance(wide, ProtocolError)
        assert [getattr(each, "verdict", each) for each in (first, last)] == ["pass", "pass"]

    asyncio.run(run())


def _call(number: int) -> CallTest:
    return CallTest(function="f", args=[number], expected=number)
