"""Assert statements taken apart: calls of the program on literal arguments, and a pure expression
judged on what they returned.

`take_apart` gives None for what it does not understand; such a test runs in a judge process instead
(`judging.py`). Invariants: nothing here runs code of the program; expressions use only the
operators and functions listed, whose cost is bounded by the size of the values; comparison is
Python's own `==` on plain values, since that is what an assert statement states.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.rewards.verifier.pure_expressions import FUNCTIONS, NotPure, evaluate, require_pure
from async_rl.sandbox.judge import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the program's function on plain arguments."""

    function: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """One assert statement: its calls, and `holds`, which takes their plain values and may raise
    what the expression raises.
    """

    source: str
    calls: tuple[Call, ...]
    expression: ast.expr

    def holds(self, values: list[Any]) -> bool:
        """The truth of the expression on the values that the calls returned."""
        return bool(evaluate(self.expression, [unwrapped(value) for value in values]))


@functools.lru_cache(maxsize=4096)
def take_apart(code: str) -> tuple[Assertion, ...] | None:
    """The assert statements of a test, also inside `def check(candidate)` followed by
    `check(name)`; None if that is not all there is.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(code).body
        statements = _asserts(body)
        return (
            tuple(_assertion(statement, renamed) for statement, renamed in statements)
            if statements
            else None
        )
    except (SyntaxError, ValueError, RecursionError, MemoryError, NotPure):
        return None
    except (ArithmeticError, TypeError, LookupError, AttributeError):
        # an argument that cannot be evaluated: the judge will raise the error in its place
        return None


def _asserts(body: list[ast.stmt]) -> list[tuple[ast.Assert, dict[str, str]]]:
    found: list[tuple[ast.Assert, dict[str, str]]] = []
    checks: dict[str, tuple[str, list[ast.stmt]]] = {}
    for statement in body:
        if isinstance(statement, ast.Assert):
            found.append((statement, {}))
        elif (
            isinstance(statement, ast.FunctionDef)
            and len(statement.args.args) == 1
            and not statement.decorator_list
        ):
            checks[statement.name] = (statement.args.args[0].arg, statement.body)
        elif _is_data(statement):
            continue
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            found += _checked(statement.value, checks)
        else:
            raise NotPure(ast.dump(statement)[:80])
    return found


def _is_data(statement: ast.stmt) -> bool:
    """A literal that asserts do not name: a docstring, METADATA = {...}."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign) and all(
        isinstance(t, ast.Name) and t.id.isupper() for t in statement.targets
    ):
        ast.literal_eval(statement.value)
        return True
    return isinstance(statement, ast.Pass)


def _checked(
    call: ast.Call, checks: Mapping[str, tuple[str, list[ast.stmt]]]
) -> list[tuple[ast.Assert, dict[str, str]]]:
    if not (
        isinstance(call.func, ast.Name)
        and call.func.id in checks
        and len(call.args) == 1
        and isinstance(call.args[0], ast.Name)
    ):
        raise NotPure("a call that is not check(name)")
    parameter, body = checks[call.func.id]
    asserts = [statement for statement in body if not _is_data(statement)]
    if not all(isinstance(statement, ast.Assert) for statement in asserts):
        raise NotPure("a check with more than asserts")
    return [(s, {parameter: call.args[0].id}) for s in asserts if isinstance(s, ast.Assert)]


def _assertion(statement: ast.Assert, renamed: Mapping[str, str]) -> Assertion:
    candidate = None if _calls_unknown(statement.test, renamed) else _leftmost_call(statement.test)
    splitter = _Splitter(renamed, candidate)
    expression = splitter.visit(statement.test)
    require_pure(expression)
    if not splitter.calls:
        raise NotPure("an assertion that calls nothing")
    return Assertion(
        source=ast.unparse(statement)[:200], calls=tuple(splitter.calls), expression=expression
    )


def _calls_unknown(expression: ast.expr, renamed: Mapping[str, str]) -> bool:
    names = {
        node.func.id
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return any(name in renamed or name not in FUNCTIONS for name in names)


def _leftmost_call(node: ast.AST) -> str | None:
    """The name called first on the left: what `assert sum(10, 15) == 6` tests, where the program's
    function has a builtin's name.
    """
    while True:
        if isinstance(node, ast.Call):
            return node.func.id if isinstance(node.func, ast.Name) else None
        if isinstance(node, ast.Compare):
            node = node.left
        elif isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.BoolOp):
            node = node.values[0]
        else:
            return None


class _Splitter(ast.NodeTransformer):
    """Replaces each call of a name that is not pure by a reference `Name('0')`, `Name('1')`, ... to
    its value.
    """

    def __init__(self, renamed: Mapping[str, str], candidate: str | None) -> None:
        self._renamed, self._candidate = renamed, candidate
        self.calls: list[Call] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if not isinstance(node.func, ast.Name) or not self._is_program(node.func.id):
            self.generic_visit(node)
            return node
        if any(keyword.arg is None for keyword in node.keywords):
            raise NotPure("** in a call")
        args = tuple(_constant(arg) for arg in node.args)
        keywords = {str(keyword.arg): _constant(keyword.value) for keyword in node.keywords}
        self.calls.append(
            Call(
                function=self._renamed.get(node.func.id, node.func.id), args=args, keywords=keywords
            )
        )
        return ast.Name(id=str(len(self.calls) - 1), ctx=ast.Load())

    def _is_program(self, name: str) -> bool:
        return name not in FUNCTIONS or name in self._renamed or name == self._candidate

    def _refuse(self, node: ast.AST) -> ast.AST:
        raise NotPure(type(node).__name__)

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = (
        visit_NamedExpr
    ) = _refuse
    visit_Await = visit_Yield = visit_JoinedStr = visit_Starred = visit_IfExp = _refuse


def _constant(node: ast.expr) -> Any:
    require_pure(node)
    if any(isinstance(inner, ast.Name) and inner.id not in FUNCTIONS for inner in ast.walk(node)):
        raise NotPure("an argument that is not constant")
    return evaluate(node, [])
