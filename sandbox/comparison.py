"""Comparison of a value or a text that a program emitted with the expected one. All values are
plain and decoded; comparing them runs no code of the program.

The host compares small ones itself. A child of a cell compares large ones (`checker.Comparer`),
because values that a program chose may take any time and memory to decode: the limits of a child
apply, and the program has exited before the child starts.

Rules
- Call tests compare exact types at every level: True is not 1, 1 is not 1.0, a list is not a tuple,
  a Counter is not a dict. A test with types=json lets a tuple be a list, 2 be 2.0 and an instance
  of a subclass (Counter, numpy.int64) be the plain value in it, but never a bool a number; with
  types=wrapped a list of one item also stands for that item. An
  assert statement compares as Python does (types=python). Floats
  may differ by the relative tolerance (or absolutely by a thousandth of it); nan equals nan. Sets
  and dict keys must be equal exactly.
- Standard output: equal after stripping leading and trailing space; else the same tokens, by the
  layout of the test's rules, each the same text or the same number. A number is an integer or a
  decimal without leading zeros, and numbers are compared exactly, as decimals. The test sets the
  tolerance; a test without one uses the relative tolerance of the configuration, which excludes
  expected integers.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal
from itertools import repeat, zip_longest
from typing import Any, NamedTuple

from .values import decode, foreign, plain

# Near zero a relative tolerance allows nothing: 1e-17 for 0.0 is rounding.
_ABSOLUTE_SHARE = 1e-3
# A longer token is compared as a text, so that reading numbers takes linear time.
_MAX_TOKEN_CHARS = 400
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
# Leading zeros make a token a text: 0011 is a string of bits, not 11.
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
# The product of two tokens has at most this many digits, so it is never rounded.
_EXACT = Context(prec=2 * _MAX_TOKEN_CHARS)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


class Rules(NamedTuple):
    """The rules of comparing printed text; core.programs.OutputRules has the meanings."""

    layout: str = "lines"
    ignores_case: bool = False
    relative_tolerance: float = 0.0
    absolute_tolerance: float = 0.0


class Returned(NamedTuple):
    """A returned value, as bytes of values.encode, and the expected value. function, args: for the
    message, which is only written for a wrong value.
    """

    body: bytes
    function: str
    args: Sequence[Any]
    expected: Any
    types: str


class Printed(NamedTuple):
    """A printed text and the expected text. rules: a plain tuple, which can enter a cell."""

    output: bytes
    expected: str
    rules: tuple[Any, ...]


def failure(emitted: Returned | Printed, relative_tolerance: float) -> str:
    """The reason why the emitted value or text is wrong; empty if it is right. relative_tolerance:
    of a `Comparison`.
    """
    comparison = Comparison(relative_tolerance)
    try:
        if isinstance(emitted, Returned):
            body, function, args, expected, types = emitted
            value = decode(body, foreign if types == "exact" else plain)
            if comparison.values_equal(value, expected, types):
                return ""
            call = f"{function}({', '.join(map(shorten, args))})"
            return f"{call} returned {shorten(value)}, not {shorten(expected)}"
        text = emitted.output.decode(errors="replace")
        if comparison.outputs_equal(text, emitted.expected, Rules(*emitted.rules)):
            return ""
        return f"printed {shorten(text)}, not {shorten(emitted.expected)}"
    # Comparing a signaling NaN raises.
    except (ArithmeticError, ValueError, MemoryError):
        return "the returned value is malformed"


class Comparison(NamedTuple):
    """The rules above. relative_tolerance: of floats where the problem states none, 0 for exact
    equality.
    """

    relative_tolerance: float

    def values_equal(self, value: Any, expected: Any, types: str = "exact") -> bool:
        """Return whether two values are equal, types included as `types` of the test requires."""
        if types == "python":
            return bool(value == expected)
        is_wrapped = types == "wrapped" and type(expected) is list and len(expected) == 1
        return self._equal(value, expected, types != "exact") or (
            is_wrapped and self._equal(value, expected[0], True)
        )

    def _equal(self, value: Any, expected: Any, is_json: bool) -> bool:
        kind = type(expected)
        if is_json and type(value) is tuple:
            value = list(value)
        if is_json and {kind, type(value)} == {int, float}:
            return bool(value == expected)
        if type(value) is not kind:
            return False
        if kind is list or kind is tuple:
            return len(value) == len(expected) and all(
                self._equal(item, wanted, is_json)
                for item, wanted in zip(value, expected, strict=True)
            )
        if kind is dict:
            # A key that is equal but of another type (1 and True) is another key.
            keys = _typed(value)
            return len(value) == len(expected) and all(
                (type(key), key) in keys and self._equal(value[key], expected[key], is_json)
                for key in expected
            )
        if kind is float:
            tolerance = self.relative_tolerance
            least = _ABSOLUTE_SHARE * tolerance
            are_nan = math.isnan(value) and math.isnan(expected)
            return are_nan or math.isclose(value, expected, rel_tol=tolerance, abs_tol=least)
        # Items of sets have no order, so a tolerance would need a matching.
        if kind is set or kind is frozenset:
            return _typed(value) == _typed(expected)
        return bool(value == expected)

    def outputs_equal(self, output: str, expected: str, rules: Rules) -> bool:
        """Return whether two outputs are equal by the rules for text."""
        if output == expected:
            return True
        if rules.layout == "exact":
            return rules.ignores_case and output.casefold() == expected.casefold()
        split = _lines if rules.layout == "lines" else _single
        for tokens, wanted in zip_longest(split(output), split(expected)):
            if tokens is None or wanted is None or len(tokens) != len(wanted):
                return False
            if tokens != wanted and not all(map(self._tokens_equal, tokens, wanted, repeat(rules))):
                return False
        return True

    def _tokens_equal(self, token: str, expected: str, rules: Rules) -> bool:
        if token == expected or (rules.ignores_case and token.casefold() == expected.casefold()):
            return True
        left = _number(token)
        right = _number(expected)
        if left is None or right is None:
            return False
        relative = rules.relative_tolerance
        absolute = rules.absolute_tolerance
        if not relative and not absolute and not _INTEGER.fullmatch(expected):
            # Not for expected integers: a count that is off by one is wrong, however large it is.
            relative = self.relative_tolerance
        difference = _EXACT.abs(_EXACT.subtract(left, right))
        bound = max(Decimal(absolute), _EXACT.multiply(Decimal(relative), _EXACT.abs(right)))
        return difference <= bound


def _lines(text: str) -> Iterator[list[str]]:
    """The tokens of each line, without leading and trailing empty lines."""
    return (line.split() for line in text.strip().split("\n"))


def _single(text: str) -> Iterator[list[str]]:
    """The tokens, each as if it was alone on its line."""
    return ([token] for token in text.split())


def _number(token: str) -> Decimal | None:
    if len(token) > _MAX_TOKEN_CHARS or not _NUMBER.fullmatch(token):
        return None
    return _EXACT.create_decimal(token)


def _typed(items: Any) -> set[tuple[type, Any]]:
    """The items with their types, because True == 1 == 1.0."""
    return {(type(item), item) for item in items}


def shorten(value: Any) -> str:
    """A value for a message: printable, at most about a hundred characters."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more digits than Python converts to decimal
        return f"a {type(value).__name__} with an integer of more than 4300 digits"
    return text[:160].encode("ascii", "backslashreplace").decode()
