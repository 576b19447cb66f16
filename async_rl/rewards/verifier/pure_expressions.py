"""The subset of Python expressions that is evaluated outside the jail: operators and functions of
bounded cost on plain values. Pure.

`require_pure` accepts an expression; `value_of` computes it. No code of a program runs here.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.sandbox.values import hashable

_MAX_SIZE = 200_000
"""Largest product or power, in bits of an integer or items of a sequence."""
_SEQUENCES = (str, list, tuple, bytes)
_NUMBERS = (int, float, bool)


class NotPure(Exception):
    """The expression contains something outside the subset."""


def _bits(value: Any) -> int:
    if type(value) in (int, bool):
        return int(value).bit_length()
    return 64 if type(value) in (float, complex) else _MAX_SIZE + 1


def _multiply(left: Any, right: Any) -> Any:
    if type(left) in _SEQUENCES and type(right) is int:
        size = len(left) * right
    else:
        size = _bits(left) + _bits(right)
    if size > _MAX_SIZE:
        raise OverflowError("too large a product")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if type(left) is int and type(right) is int and _bits(left) * abs(right) > _MAX_SIZE:
        raise OverflowError("too large a power")
    if type(left) not in (int, float) or type(right) not in (int, float):
        raise TypeError("power of numbers only")
    return left**right


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The operator for numbers only: `%` on a string can produce gigabytes."""

    def apply(left: Any, right: Any) -> Any:
        if type(left) not in _NUMBERS or type(right) not in _NUMBERS:
            raise TypeError("numbers only")
        return function(left, right)

    return apply


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: _of_numbers(operator.truediv),
    ast.FloorDiv: _of_numbers(operator.floordiv),
    ast.Mod: _of_numbers(operator.mod),
    ast.Pow: _power,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}
_FUNCTIONS = (abs, all, any, bool, float, int, len, list, max, min, sorted, str, sum, tuple)


def _hashing(kind: Callable[..., Any]) -> Callable[..., Any]:
    """The set type for items that a program chose: it could choose items of equal hashes."""
    return lambda *items: kind(*(hashable(list(given)) for given in items))


def _dict(*given: Any, **named: Any) -> dict[Any, Any]:
    for pairs in given:
        hashable(list(pairs) if type(pairs) is dict else [pair[0] for pair in pairs])
    return dict(*given, **named)


def _round(number: Any, ndigits: Any = None) -> Any:
    # For an integer Python computes 10 ** -ndigits. No value here has as many digits as this.
    return round(number, max(ndigits, -_MAX_SIZE) if type(ndigits) is int else ndigits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in _FUNCTIONS},
    "round": _round,
    "set": _hashing(set),
    "frozenset": _hashing(frozenset),
    "dict": _dict,
}
_MATH_NAMES = ("isclose", "sqrt", "floor", "ceil", "isnan", "pi", "e", "inf", "nan")
_MATH = {name: getattr(math, name) for name in _MATH_NAMES}
_KNOWN = (
    *_OPERATORS,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.UnaryOp,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.Subscript,
    ast.Slice,
    ast.And,
    ast.Or,
    ast.Load,
)


def require_pure(expression: ast.expr) -> None:
    """Raise NotPure unless `value_of` can compute every node of the expression."""
    for node in ast.walk(expression):
        if not _is_pure(node):
            raise NotPure(ast.dump(node)[:80])


def _is_pure(node: ast.AST) -> bool:
    match node:
        case ast.Name():
            return node.id.isdecimal() or node.id in FUNCTIONS or node.id == "math"
        case ast.Attribute():
            return (
                isinstance(node.value, ast.Name) and node.value.id == "math" and node.attr in _MATH
            )
        case ast.Call():
            if isinstance(node.func, ast.Name) and node.func.id == "sum":
                return len(node.args) == 1 and not node.keywords  # joining lists takes n^2 time
            is_named = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
            return is_named or isinstance(node.func, ast.Attribute)
        case ast.Dict():
            return None not in node.keys  # {**other}
        case ast.keyword():
            return node.arg is not None  # f(**other)
    return isinstance(node, _KNOWN)


def value_of(node: ast.expr | None, values: Sequence[Any]) -> Any:
    """The value of an expression that `require_pure` accepted; `Name('0')` is values[0].

    Raises the exceptions of the expression.
    """
    compute = functools.partial(value_of, values=values)
    match node:
        case None:  # an end of a slice that is left out
            return None
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[int(node.id)] if node.id.isdecimal() else FUNCTIONS[node.id]
        case ast.Attribute():
            return _MATH[node.attr]
        case ast.Tuple():
            return tuple(map(compute, node.elts))
        case ast.List():
            return list(map(compute, node.elts))
        case ast.Set():
            return set(map(compute, node.elts))
        case ast.Dict():
            return dict(zip(map(compute, node.keys), map(compute, node.values), strict=True))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](compute(node.operand))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](compute(node.left), compute(node.right))
        case ast.BoolOp():
            return _any_or_all(node, compute)
        case ast.Compare():
            return _compare(node, compute)
        case ast.Call():
            keywords = {str(keyword.arg): compute(keyword.value) for keyword in node.keywords}
            return compute(node.func)(*map(compute, node.args), **keywords)
        case ast.Subscript():
            return compute(node.value)[compute(node.slice)]
        case ast.Slice():
            return slice(compute(node.lower), compute(node.upper), compute(node.step))
    raise NotPure(ast.dump(node))


def _any_or_all(node: ast.BoolOp, compute: Callable[[ast.expr], Any]) -> Any:
    result: Any = None
    for part in node.values:
        result = compute(part)
        if bool(result) is isinstance(node.op, ast.Or):
            break
    return result


def _compare(node: ast.Compare, compute: Callable[[ast.expr], Any]) -> Any:
    left, result = compute(node.left), True
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = compute(comparator)
        result = _OPERATORS[type(op)](left, right)
        if not result:
            break
        left = right
    return result
