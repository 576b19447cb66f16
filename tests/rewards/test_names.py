"""A name of a test is the test's own, its imports' or the interpreter's; only `solution.NAME` and a
free name that nothing else defines is the program's. Generated over every builtin, every form of
import and every style of test, each with a program that forges and one that is right.
"""

from __future__ import annotations

import builtins

import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest
from async_rl.rewards.verifier.protocol import VerifyRequest

SETUP = "from math import isclose\nfrom collections import Counter\ndef helper(x): return x * 10\n"
IMPORTS = {
    "free": ("", "f"),
    "from": ("from solution import f\n", "f"),
    "module": ("import solution\n", "solution.f"),
    "alias": ("import solution as s\n", "s.f"),
    "star": ("from solution import *\n", "f"),
    "star of others": ("from string import *\nfrom solution import f\n", "f"),
}
STYLES = table(__file__, "styles")


_INTERACTIVE = ("exit", "quit", "input", "help", "copyright", "credits", "license")


def uses() -> dict[str, str]:
    """A use of each name that is true exactly if F(3) is 9 and the name is not the program's."""
    found = {
        "helper": "helper(F(3)) == 90",
        "isclose": "isclose(F(3), 9.0)",
        "Counter": "Counter([F(3)]) == {9: 1}",
        "math": "math.sqrt(F(3)) == 3.0",
    }
    for name, value in vars(builtins).items():
        if name.startswith("_") or not callable(value) or name in _INTERACTIVE:
            continue
        found[name] = f"{name} is __import__('builtins').{name} and F(3) == 9"
        if name not in ("print", "breakpoint", "open", "dir", "vars", "id", "object", "iter"):
            for argument in ("{}", "[{}]", "str({})"):
                try:
                    expected = eval(f"{name}({argument.format(9)})")
                    if type(expected) in (int, str, bool, float, list, tuple, dict, complex):
                        assert eval(f"{name}({argument.format(5)}) != expected")
                        found[name] = f"{name}({argument.format('F(3)')}) == {expected!r}"
                        break
                except (AssertionError, TypeError, ValueError, OSError):
                    continue
    return found


USES = uses()
LIES = "".join(
    f"def {name}(*args, **keywords): return {use.rpartition('==')[2] or True}\n"
    for name, use in USES.items()
)
FORGING, RIGHT = LIES + "def f(x): return 5\n", LIES + "def f(x): return 9\n"


def verdicts(jail: Jail, code: str, tests: list[AssertTest], setup: str = SETUP) -> list[str]:
    request = VerifyRequest(
        code=code, tests=[*tests], setup=setup, timeout_s=10, stop_at_first_failure=False
    )
    return [str(test.verdict) for test in jail.verify(request).tests]


@pytest.mark.parametrize("place", ["test", "setup"])
@pytest.mark.parametrize("form", IMPORTS)
@pytest.mark.parametrize("style", STYLES)
def test_no_name_of_a_test_is_asked_of_the_program(
    jail: Jail, style: str, form: str, place: str
) -> None:
    line, function = IMPORTS[form]
    codes = []
    for use in USES.values():
        test, check = use.replace("F(", f"{function}("), use.replace("F(", "candidate(")
        body = STYLES[style].format(test=test, check=check, function=function)
        codes.append(AssertTest(code=body if place == "setup" else line + body))
    setup = SETUP + (line if place == "setup" else "")
    for code, right in ((RIGHT, "pass"), (FORGING, "wrong_answer")):
        found = dict(zip(USES, verdicts(jail, code, codes, setup), strict=True))
        assert {name: verdict for name, verdict in found.items() if verdict != right} == {}


@pytest.mark.parametrize("code", ["assert {}(3, k=1) == 4", "x = {}(3, k=1)\nassert x == 4"])
def test_a_name_that_the_row_gives_to_the_program_is_asked_of_it(jail: Jail, code: str) -> None:
    tests = [AssertTest(code=code.format(name), names=[name]) for name in USES]
    for body, right in (("x + k", "pass"), ("x", "wrong_answer")):
        program = "".join(f"def {name}(x, k): return {body}\n" for name in USES)
        assert verdicts(jail, program, tests) == [right] * len(tests)
    assert verdicts(jail, "", tests) == ["runtime_error"] * len(tests)
