"""Assert tests that consist of calls with expected values.

`assert f(literals) == literal` is judged as a call test, by Python's own `==`: a batch of calls
needs one child instead of two. This is the meaning that the judge (sandbox/judge.py) gives to the
same statement: there too the arguments are copied, the plain copy of the value is compared, and a
value that is not plain equals nothing. Every other test runs there. No code of a program or of a
test runs here.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from async_rl.core.assert_tests import asked_by
from async_rl.core.types import CallTest


class Call(NamedTuple):
    """One call of the program's function on plain arguments, and the value that is right. types:
    how they are compared (sandbox/comparison.py).
    """

    function: str
    args: Sequence[Any]
    expected: Any
    types: str

    @classmethod
    def of(cls, test: CallTest) -> Call:
        """The call of a call test."""
        return cls(test.function, test.args, test.expected, test.types)


@functools.lru_cache(maxsize=4096)
def calls_of(setup: str, code: str, own: frozenset[str]) -> tuple[Call, ...] | None:
    """The calls of a test; None if it has anything else, or no call. own: names that the row says
    the program defines.
    """
    # A setup may bind a name or fail.
    if setup.strip():
        return None
    names = asked_by(setup, code, own).names
    # A test that does not compile asks for no name either.
    if not names:
        return None
    try:
        calls = tuple(_calls(ast.parse(code).body))
    except (ValueError, TypeError, RecursionError):
        return None
    return calls if calls and names.issuperset(call.function for call in calls) else None


def _calls(body: list[ast.stmt]) -> Iterator[Call]:
    """Raises ValueError for a statement of another form."""
    for statement in body:
        match statement:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]),
                    ops=[ast.Eq()],
                    comparators=[expected],
                )
            ):
                literal = ast.literal_eval
                yield Call(name, [*map(literal, args)], literal(expected), "python")
            case _:
                raise ValueError("a statement of another form")
