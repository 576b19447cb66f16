"""The part of Python's expressions that is evaluated outside the jail: operators and functions of
bounded cost on plain values. Pure.

Used by `asserts.py` for arguments and for what an assert statement says of returned values.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_MAX_BITS = 10_000
"""Bits or items of the largest product or power."""


class NotPure(Exception):
    """The expression holds something outside the subset."""


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
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _bits(value: Any) -> int:
    if type(value) in (int, bool):
        return int(value).bit_length()
    return 64 if type(value) in (float, complex) else _MAX_BITS + 1


def _multiply(left: Any, right: Any) -> Any:
    size = (
        len(left) * right
        if type(left) in (str, list, tuple, bytes) and type(right) is int
        else _bits(left) + _bits(right)
    )
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
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "dict": dict, "float": float, "frozenset": frozenset, "int": int, "len": len,
    "list": list, "max": max, "min": min, "round": round, "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple,
}  # fmt: skip
_MATH = {
    "isclose": math.isclose,
    "sqrt": math.sqrt,
    "floor": math.floor,
    "ceil": math.ceil,
    "isnan": math.isnan,
}
_MATH_CONSTANTS = {"pi": math.pi, "e": math.e, "inf": math.inf, "nan": math.nan}


def require_pure(node: ast.expr) -> None:
    """Raises NotPure unless every node is one that `_evaluate` knows."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            is_math = isinstance(inner.func, ast.Attribute) and _math_name(inner.func) in _MATH
            if not is_math and not (
                isinstance(inner.func, ast.Name) and inner.func.id in FUNCTIONS
            ):
                raise NotPure("a call")
        elif isinstance(inner, ast.Name):
            if not inner.id.isdecimal() and inner.id not in FUNCTIONS and inner.id != "math":
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
    is_known = (
        isinstance(node.value, ast.Name)
        and node.value.id == "math"
        and (node.attr in _MATH or node.attr in _MATH_CONSTANTS)
    )
    return node.attr if is_known else None


def evaluate(node: ast.expr, values: list[Any]) -> Any:
    """The value of an expression that `require_pure` accepted; `Name('0')` is values[0]. Raises
    what the expression raises.
    """
    return _EVALUATORS[type(node)](node, values)


def _name(node: Any, values: list[Any]) -> Any:
    if not node.id.isdecimal():
        raise TypeError(f"{node.id} is a function")
    return values[int(node.id)]


def _dict(node: Any, values: list[Any]) -> Any:
    return {
        evaluate(key, values): evaluate(value, values)
        for key, value in zip(node.keys, node.values, strict=True)
    }


def _bool(node: Any, values: list[Any]) -> Any:
    result: Any = None
    for part in node.values:
        result = evaluate(part, values)
        if bool(result) is isinstance(node.op, ast.Or):
            break
    return result


def _compare(node: Any, values: list[Any]) -> Any:
    left, result = evaluate(node.left, values), True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = evaluate(comparator, values)
        result = _COMPARE[type(op)](left, right)
        if not result:
            break
        left = right
    return result


def _call(node: Any, values: list[Any]) -> Any:
    function: Any = (
        _MATH[node.func.attr] if isinstance(node.func, ast.Attribute) else FUNCTIONS[node.func.id]
    )
    keywords = {keyword.arg: evaluate(keyword.value, values) for keyword in node.keywords}
    return function(*(evaluate(arg, values) for arg in node.args), **keywords)


def _slice(node: Any, values: list[Any]) -> Any:
    return slice(
        *(
            None if part is None else evaluate(part, values)
            for part in (node.lower, node.upper, node.step)
        )
    )


_EVALUATORS: dict[type[ast.expr], Callable[[Any, list[Any]], Any]] = {
    ast.Constant: lambda node, values: node.value,
    ast.Tuple: lambda node, values: tuple(evaluate(item, values) for item in node.elts),
    ast.List: lambda node, values: [evaluate(item, values) for item in node.elts],
    ast.Set: lambda node, values: {evaluate(item, values) for item in node.elts},
    ast.Dict: _dict,
    ast.Name: _name,
    ast.UnaryOp: lambda node, values: _UNARY[type(node.op)](evaluate(node.operand, values)),
    ast.BinOp: lambda node, values: _BINARY[type(node.op)](
        evaluate(node.left, values), evaluate(node.right, values)
    ),
    ast.BoolOp: _bool,
    ast.Compare: _compare,
    ast.Call: _call,
    ast.Subscript: lambda node, values: evaluate(node.value, values)[evaluate(node.slice, values)],
    ast.Slice: _slice,
    ast.Attribute: lambda node, values: _MATH_CONSTANTS[node.attr],
}
