"""Assert statements taken apart into calls of the program on literal arguments and a pure
expression on the values that the calls return.

`take_apart` returns None for a test that it does not understand. Such a test runs in a judge
process instead (`judging.py`), as `judged_test` prepares it. Invariants: no code of the program
runs here; a name that Python or the setup defines never means a function of the program, unless it
is the one under test; expressions use only the listed operators and functions, whose cost is
bounded by the size of the values; comparison is Python's own `==` on plain values, as in an
assert statement.
"""

from __future__ import annotations

import ast
import builtins
import functools
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from async_rl.core.assert_tests import asked_by, leftmost_call
from async_rl.core.frozen import frozen
from async_rl.rewards.verifier.pure_expressions import (
    FUNCTIONS,
    NotPure,
    TooLarge,
    require_pure,
    value_of,
)
from async_rl.sandbox.comparison import shorten
from async_rl.sandbox.protocol import TestCode
from async_rl.sandbox.values import unwrapped

# A message quotes the statement.
_MAX_SOURCE_CHARS = 200
_BUILTINS = frozenset(vars(builtins))
_RAISED = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


class FunctionCall(NamedTuple):
    """One call of the program's function on plain arguments."""

    function: str
    args: Sequence[Any]
    keywords: dict[str, Any]


@frozen
class Assertion:
    """One assert statement: its calls, and an expression on their values."""

    source: str
    calls: tuple[FunctionCall, ...]
    expression: ast.expr

    def holds(self, values: Sequence[Any]) -> bool:
        """The truth of the expression on the returned values. Raises TooLarge or its exceptions."""
        return bool(value_of(self.expression, [unwrapped(value) for value in values]))

    def failure(self, values: Sequence[Any]) -> str:
        """The reason why the returned values are wrong; empty if the assertion holds.

        Raises TooLarge.
        """
        try:
            if self.holds(values):
                return ""
        except _RAISED as error:
            return f"{self.source} raised {type(error).__name__}: {str(error)[:100]}"
        return f"{self.source} failed for {', '.join(map(shorten, values))}"


@functools.lru_cache(maxsize=4096)
def take_apart(code: str, setup: str) -> tuple[Assertion, ...] | None:
    """The assert statements of a test, also inside `def check(candidate)` and `check(name)`.

    None if the test contains anything else, or no assert statement. setup: code that the test may
    use.
    """
    asked = asked_by(setup, code)
    # An expression would use Python's own functions in place of the test's.
    if asked.fault or asked.bound & {"*", *FUNCTIONS}:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = _asserts(ast.parse(code).body)
            return tuple(_assertion(*pair, asked.free) for pair in pairs) or None
    except (NotPure, TooLarge, *_RAISED):
        # Also an argument that cannot be evaluated: the judge process will raise its error.
        return None


def judged_test(setup: str, code: str) -> TestCode:
    """A test for a judge process."""
    asked = asked_by(setup, code)
    return TestCode(setup, code, asked.imports, sorted(asked.free), sorted(asked.tested))


_Renamed = Mapping[str, str]
"""Name of a check function's parameter -> name of the program's function."""


def _asserts(body: list[ast.stmt]) -> list[tuple[ast.Assert, _Renamed]]:
    asserts: list[tuple[ast.Assert, _Renamed]] = []
    checks: dict[str, ast.FunctionDef] = {}
    for statement in body:
        match statement:
            case ast.Assert():
                asserts.append((statement, {}))
            # Not run here: only its asserts are read, once it is called with a name.
            case ast.FunctionDef(args=ast.arguments(args=[_]), decorator_list=[]):
                checks[statement.name] = statement
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=check), args=[ast.Name(id=function)])
            ) if check in checks:
                definition = checks[check]
                renamed = {definition.args.args[0].arg: function}
                asserts += [(assertion, renamed) for assertion in _asserts_only(definition.body)]
            case _ if not _is_data(statement):
                raise NotPure(ast.dump(statement)[:80])
    return asserts


def _asserts_only(body: list[ast.stmt]) -> list[ast.Assert]:
    asserts = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            asserts.append(statement)
        elif not _is_data(statement):
            raise NotPure("a check with more than asserts")
    return asserts


def _is_data(statement: ast.stmt) -> bool:
    """A literal that asserts do not name: a docstring, METADATA = {...}."""
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign():
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            if len(names) == len(statement.targets) and all(map(str.isupper, names)):
                ast.literal_eval(statement.value)
                return True
    return False


def _assertion(statement: ast.Assert, renamed: _Renamed, free: Set[str]) -> Assertion:
    if not free | _BUILTINS >= set(renamed.values()):
        raise NotPure("the setup defines the function under test")
    asked = {*renamed, *(_called(statement.test) & free)}
    if not asked:
        # `assert sum(10, 15) == 6` tests a function of the program that has a builtin's name.
        asked = {*filter(None, [leftmost_call(statement.test)])} & _BUILTINS
    source = ast.unparse(statement)[:_MAX_SOURCE_CHARS]  # before the splitter changes it
    splitter = _Splitter(renamed, asked)
    expression = splitter.visit(statement.test)
    require_pure(expression)
    # It would pass every program.
    if not splitter.calls:
        raise NotPure("an assertion without a call")
    return Assertion(source=source, calls=tuple(splitter.calls), expression=expression)


def _called(expression: ast.expr) -> set[str]:
    calls = [node.func for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


class _Splitter(ast.NodeTransformer):
    """Replaces the calls of the program by references to their values: `Name('0')`, ..."""

    def __init__(self, renamed: _Renamed, asked: Set[str]) -> None:
        self._renamed, self._asked = renamed, asked
        self.calls: list[FunctionCall] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if not isinstance(node.func, ast.Name) or node.func.id not in self._asked:
            self.generic_visit(node)
            return node
        keywords = {}
        for keyword in node.keywords:
            # The names of its arguments are known only when it runs.
            if keyword.arg is None:
                raise NotPure("** in a call")
            keywords[keyword.arg] = _constant(keyword.value)
        function = self._renamed.get(node.func.id, node.func.id)
        self.calls.append(FunctionCall(function, tuple(map(_constant, node.args)), keywords))
        return ast.Name(id=str(len(self.calls) - 1), ctx=ast.Load())


def _constant(node: ast.expr) -> Any:
    require_pure(node)
    return value_of(node, ())
