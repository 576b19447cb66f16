"""A name of a test is the test's own, its imports' or the interpreter's; only `solution.NAME` and a
free name that nothing else defines is the program's. Generated over every builtin, every form of
import and every style of test, each with a program that forges and one that is right.
"""

import builtins
import itertools

import pytest
from rewards_support import Jail
from tables import table

from async_rl.core.types import AssertTest

SETUP, IMPORTS, STYLES = (table(__file__, name) for name in ("setup", "imports", "styles"))
_INTERACTIVE = ("exit", "quit", "input", "help", "copyright", "credits", "license")
_NOT_CALLED = ("print", "breakpoint", "open", "dir", "vars", "id", "object", "iter")


def uses() -> dict[str, str]:
    """A use of each name that is true exactly if F(3) is 9 and the name is not the program's."""
    found: dict[str, str] = dict(table(__file__, "uses"))
    for name, value in vars(builtins).items():
        if name.startswith("_") or not callable(value) or name in _INTERACTIVE:
            continue
        found[name] = f"{name} is __import__('builtins').{name} and F(3) == 9"
        for argument in ("{}", "[{}]", "str({})") if name not in _NOT_CALLED else ():
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
# Each style with one form, and each form in both places with one style: they do not interact.
COMBINED = [
    *itertools.product(STYLES, ["free"], ["test"]),
    *itertools.product(["check"], IMPORTS, ["test", "setup"]),
]


@pytest.mark.parametrize(("style", "form", "place"), COMBINED)
def test_no_name_of_a_test_is_asked_of_the_program(
    jail: Jail, style: str, form: str, place: str
) -> None:
    line, function = IMPORTS[form]
    codes = []
    for use in USES.values():
        test, check = use.replace("F(", f"{function}("), use.replace("F(", "candidate(")
        body = STYLES[style].format(test=test, check=check, function=function)
        codes.append(body if place == "setup" else line + body)
    setup = SETUP + (line if place == "setup" else "")
    for code, right in ((RIGHT, "pass"), (FORGING, "wrong_answer")):
        verdicts = jail.verdicts(code, codes, setup=setup, timeout_s=10)
        found = dict(zip(USES, verdicts, strict=True))
        assert {name: verdict for name, verdict in found.items() if verdict != right} == {}


def test_a_name_that_the_row_gives_to_the_program_is_asked_of_it(jail: Jail) -> None:
    tests = [
        AssertTest(code=code.format(name), names=[name])
        for code, name in zip(
            itertools.cycle(["assert {}(3, k=1) == 4", "x = {}(3, k=1)\nassert x == 4"]), USES
        )
    ]
    for body, right in (("x + k", "pass"), ("x", "wrong_answer")):
        program = "".join(f"def {name}(x, k): return {body}\n" for name in USES)
        verdicts = jail.verdicts(program, tests, setup=SETUP, timeout_s=10)
        assert verdicts == [right] * len(tests)
    assert jail.verdicts("", tests, setup=SETUP, timeout_s=10) == ["runtime_error"] * len(tests)
