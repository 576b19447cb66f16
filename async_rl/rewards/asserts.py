"""Assert statements taken apart: calls of the program on literal arguments, and a pure expression judged on what they returned.

`take_apart` gives None for what it does not understand; such a test runs in a judge process instead (`judging.py`).
Invariants: nothing here runs code of the program; expressions use only the operators and functions listed, whose cost is bounded by the
size of the values; comparison is Python's own `==` on plain values, since that is what an assert statement states.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.sandbox.judge import unwrapped

_MAX_BITS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the program's function on plain arguments."""

    function: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """One assert statement: its calls, and `holds`, which takes their plain values and may raise what the expression raises."""

    source: str
    calls: tuple[Call, ...]
    expression: ast.expr

    def holds(self, values: list[Any]) -> bool:
        """The truth of the expression on the values that the calls returned."""
        return bool(_evaluate(self.expression, [unwrapped(value) for value in values]))


class NotPure(Exception):
    """The expression holds something outside the subset."""


@functools.lru_cache(maxsize=4096)
def take_apart(code: str) -> tuple[Assertion, ...] | None:
    """The assert statements of a test, also inside `def check(candidate)` followed by `check(name)`; None if that is not all there is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(code).body
        statements = _asserts(body)
        return tuple(_assertion(statement, renamed) for statement, renamed in statements) if statements else None
    except (SyntaxError, ValueError, RecursionError, MemoryError, NotPure):
        return None
    except (ArithmeticError, TypeError, LookupError, AttributeError):
        return None  # an argument that cannot be evaluated: the judge will raise the error in its place


def _asserts(body: list[ast.stmt]) -> list[tuple[ast.Assert, dict[str, str]]]:
    found: list[tuple[ast.Assert, dict[str, str]]] = []
    checks: dict[str, tuple[str, list[ast.stmt]]] = {}
    for statement in body:
        if isinstance(statement, ast.Assert):
            found.append((statement, {}))
        elif isinstance(statement, ast.FunctionDef) and len(statement.args.args) == 1 and not statement.decorator_list:
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
    if isinstance(statement, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in statement.targets):
        ast.literal_eval(statement.value)
        return True
    return isinstance(statement, ast.Pass)


def _checked(call: ast.Call, checks: Mapping[str, tuple[str, list[ast.stmt]]]) -> list[tuple[ast.Assert, dict[str, str]]]:
    if not (isinstance(call.func, ast.Name) and call.func.id in checks and len(call.args) == 1 and isinstance(call.args[0], ast.Name)):
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
    _require_pure(expression)
    if not splitter.calls:
        raise NotPure("an assertion that calls nothing")
    return Assertion(source=ast.unparse(statement)[:200], calls=tuple(splitter.calls), expression=expression)


def _calls_unknown(expression: ast.expr, renamed: Mapping[str, str]) -> bool:
    names = {node.func.id for node in ast.walk(expression) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return any(name in renamed or name not in _FUNCTIONS for name in names)


def _leftmost_call(node: ast.AST) -> str | None:
    """The name called first on the left: what `assert sum(10, 15) == 6` tests, where the program's function has a builtin's name."""
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
    """Replaces each call of a name that is not pure by a reference `Name('0')`, `Name('1')`, ... to its value."""

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
        self.calls.append(Call(function=self._renamed.get(node.func.id, node.func.id), args=args, keywords=keywords))
        return ast.Name(id=str(len(self.calls) - 1), ctx=ast.Load())

    def _is_program(self, name: str) -> bool:
        return name not in _FUNCTIONS or name in self._renamed or name == self._candidate

    def _refuse(self, node: ast.AST) -> ast.AST:
        raise NotPure(type(node).__name__)

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_NamedExpr = _refuse
    visit_Await = visit_Yield = visit_JoinedStr = visit_Starred = visit_IfExp = _refuse


def _constant(node: ast.expr) -> Any:
    _require_pure(node)
    if any(isinstance(inner, ast.Name) and inner.id not in _FUNCTIONS for inner in ast.walk(node)):
        raise NotPure("an argument that is not constant")
    return _evaluate(node, [])


# ---- the pure subset

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}


def _bits(value: Any) -> int:
    if type(value) in (int, bool):
        return int(value).bit_length()
    return 64 if type(value) in (float, complex) else _MAX_BITS + 1


def _multiply(left: Any, right: Any) -> Any:
    size = len(left) * right if type(left) in (str, list, tuple, bytes) and type(right) is int else _bits(left) + _bits(right)
    if size > _MAX_BITS:
        raise OverflowError("too large a product")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if type(left) is int and type(right) is int and _bits(left) * abs(right) > _MAX_BITS:
        raise OverflowError("too large a power")
    if type(left) not in (int, float) or type(right) not in (int, float):
        raise TypeError("power of numbers only")
    return left**right


def _number_only(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(left: Any, right: Any) -> Any:
        if type(left) not in (int, float, bool) or type(right) not in (int, float, bool):
            raise TypeError("numbers only")
        return function(left, right)

    return apply


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: _number_only(operator.truediv),
    ast.FloorDiv: _number_only(operator.floordiv),
    ast.Mod: _number_only(operator.mod),
    ast.Pow: _power,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "dict": dict, "float": float, "frozenset": frozenset, "int": int, "len": len,
    "list": list, "max": max, "min": min, "round": round, "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple,
}  # fmt: skip
_MATH = {"isclose": math.isclose, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil, "isnan": math.isnan}
_MATH_CONSTANTS = {"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan}


def _require_pure(node: ast.expr) -> None:
    """Raises NotPure unless every node is one that `_evaluate` knows."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            is_math = isinstance(inner.func, ast.Attribute) and _math_name(inner.func) in _MATH
            if not is_math and not (isinstance(inner.func, ast.Name) and inner.func.id in _FUNCTIONS):
                raise NotPure("a call")
        elif isinstance(inner, ast.Name):
            if not inner.id.isdecimal() and inner.id not in _FUNCTIONS and inner.id != "math":
                raise NotPure(inner.id)
        elif isinstance(inner, ast.Attribute):
            if _math_name(inner) is None:
                raise NotPure("an attribute")
        elif not isinstance(inner, _KNOWN):
            raise NotPure(type(inner).__name__)
        if isinstance(inner, ast.BinOp) and type(inner.op) not in _BINARY:
            raise NotPure(type(inner.op).__name__)
        if isinstance(inner, ast.UnaryOp) and type(inner.op) not in _UNARY:
            raise NotPure(type(inner.op).__name__)


_KNOWN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.Subscript, ast.Slice,
    ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip


def _math_name(node: ast.Attribute) -> str | None:
    is_known = isinstance(node.value, ast.Name) and node.value.id == "math" and (node.attr in _MATH or node.attr in _MATH_CONSTANTS)
    return node.attr if is_known else None


def _evaluate(node: ast.expr, values: list[Any]) -> Any:
    return _EVALUATORS[type(node)](node, values)


def _name(node: Any, values: list[Any]) -> Any:
    if not node.id.isdecimal():
        raise TypeError(f"{node.id} is a function")
    return values[int(node.id)]


def _dict(node: Any, values: list[Any]) -> Any:
    return {_evaluate(key, values): _evaluate(value, values) for key, value in zip(node.keys, node.values, strict=True)}


def _bool(node: Any, values: list[Any]) -> Any:
    result: Any = None
    for part in node.values:
        result = _evaluate(part, values)
        if bool(result) is isinstance(node.op, ast.Or):
            break
    return result


def _compare(node: Any, values: list[Any]) -> Any:
    left, result = _evaluate(node.left, values), True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(comparator, values)
        result = _COMPARE[type(op)](left, right)
        if not result:
            break
        left = right
    return result


def _call(node: Any, values: list[Any]) -> Any:
    function: Any = _MATH[node.func.attr] if isinstance(node.func, ast.Attribute) else _FUNCTIONS[node.func.id]
    keywords = {keyword.arg: _evaluate(keyword.value, values) for keyword in node.keywords}
    return function(*(_evaluate(arg, values) for arg in node.args), **keywords)


def _slice(node: Any, values: list[Any]) -> Any:
    return slice(*(None if part is None else _evaluate(part, values) for part in (node.lower, node.upper, node.step)))


_EVALUATORS: dict[type[ast.expr], Callable[[Any, list[Any]], Any]] = {
    ast.Constant: lambda node, values: node.value,
    ast.Tuple: lambda node, values: tuple(_evaluate(item, values) for item in node.elts),
    ast.List: lambda node, values: [_evaluate(item, values) for item in node.elts],
    ast.Set: lambda node, values: {_evaluate(item, values) for item in node.elts},
    ast.Dict: _dict,
    ast.Name: _name,
    ast.UnaryOp: lambda node, values: _UNARY[type(node.op)](_evaluate(node.operand, values)),
    ast.BinOp: lambda node, values: _BINARY[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values)),
    ast.BoolOp: _bool,
    ast.Compare: _compare,
    ast.Call: _call,
    ast.Subscript: lambda node, values: _evaluate(node.value, values)[_evaluate(node.slice, values)],
    ast.Slice: _slice,
    ast.Attribute: lambda node, values: _MATH_CONSTANTS[node.attr],
}
