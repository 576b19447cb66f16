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
from itertools import pairwise
from typing import Any

from async_rl.sandbox.values import hashable

# Largest product or power, in bits of an integer or items of a sequence.
_MAX_SIZE = 200_000
_SEQUENCES = (str, list, tuple, bytes)


class NotPure(Exception):
    """The expression contains something outside the subset."""


class TooLarge(Exception):
    """The values are too large to be compared here, or too costly for an operator."""


def _bits(value: Any) -> int:
    if type(value) in (int, bool):
        return int(value).bit_length()
    return 64 if type(value) in (float, complex) else _MAX_SIZE + 1


def _sum_of_bits(left: Any, right: Any) -> int:
    return _bits(left) + _bits(right)


def _size_of_product(left: Any, right: Any) -> int:
    is_repeated = type(left) in _SEQUENCES and type(right) is int
    return len(left) * right if is_repeated else _sum_of_bits(left, right)


def _size_of_power(left: Any, right: Any) -> int:
    return _bits(left) * abs(right) if type(right) is int else _sum_of_bits(left, right)


def _bounded(
    function: Callable[[Any, Any], Any], size: Callable[[Any, Any], int]
) -> Callable[[Any, Any], Any]:
    def apply(left: Any, right: Any) -> Any:
        if size(left, right) > _MAX_SIZE:
            raise TooLarge
        return function(left, right)

    return apply


# Shifts are absent: `1 << n` has no bound, and a judge process computes it within limits.
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
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.Mult: _bounded(operator.mul, _size_of_product),
    ast.Pow: _bounded(operator.pow, _size_of_power),
    ast.Div: _bounded(operator.truediv, _sum_of_bits),
    ast.FloorDiv: _bounded(operator.floordiv, _sum_of_bits),
    # For numbers only: `%` on a string can produce gigabytes.
    ast.Mod: _bounded(operator.mod, _sum_of_bits),
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
_DISPLAYS: dict[type[ast.expr], Callable[..., Any]] = {
    ast.Tuple: tuple, ast.List: list, ast.Set: set
}  # fmt: skip
_KNOWN = (
    *_OPERATORS, *_DISPLAYS, ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare,
    ast.Subscript, ast.Slice, ast.boolop, ast.Load,
)  # fmt: skip


def require_pure(expression: ast.expr) -> None:
    """Raise NotPure unless `value_of` can compute every node of the expression."""
    for node in ast.walk(expression):
        if not _is_pure(node):
            raise NotPure(ast.dump(node)[:80])


def _is_pure(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name):
            return name.isdecimal() or name in FUNCTIONS or name == "math"
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name in _MATH
        case ast.Call(func=ast.Name(id="sum")):
            return len(node.args) == 1 and not node.keywords  # joining lists takes n^2 time
        case ast.Call(func=ast.Name(id=name)):
            return name in FUNCTIONS
        case ast.Call(func=ast.Attribute()):
            return True
        case ast.Dict():
            return None not in node.keys  # {**other}
        case ast.keyword():
            return node.arg is not None  # f(**other)
    return isinstance(node, _KNOWN)


def value_of(node: ast.expr | None, values: Sequence[Any]) -> Any:
    """The value of an expression that `require_pure` accepted; `Name('0')` is values[0].

    Raises TooLarge, or the exceptions of the expression.
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
        case ast.Tuple() | ast.List() | ast.Set():
            return _DISPLAYS[type(node)](map(compute, node.elts))
        case ast.Dict():
            return dict(zip(map(compute, node.keys), map(compute, node.values), strict=True))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](compute(node.operand))
        case ast.BinOp():
            return _OPERATORS[type(node.op)](compute(node.left), compute(node.right))
        case ast.BoolOp():
            for part in node.values:
                value = compute(part)
                if bool(value) is isinstance(node.op, ast.Or):
                    break
            return value
        case ast.Compare():
            # Lazy, as in Python: nothing after the first comparison that fails is computed.
            pairs = pairwise(map(compute, (node.left, *node.comparators)))
            return all(
                _OPERATORS[type(op)](*pair) for op, pair in zip(node.ops, pairs, strict=True)
            )
        case ast.Call():
            keywords = {str(keyword.arg): compute(keyword.value) for keyword in node.keywords}
            return compute(node.func)(*map(compute, node.args), **keywords)
        case ast.Subscript():
            return compute(node.value)[compute(node.slice)]
        case ast.Slice():
            return slice(compute(node.lower), compute(node.upper), compute(node.step))
    raise NotPure(ast.dump(node))
