"""Comparison of a value or a text that a program emitted with the expected one. All values are
plain and decoded; comparing them runs no code of the program.

Rules
- Call tests compare exact types at every level: True is not 1, 1 is not 1.0, a list is not a tuple,
  a Counter is not a dict. A test with types=json lets a tuple be a list, 2 be 2.0 and an instance
  of a subclass (Counter, numpy.int64) be the plain value in it, but never a bool a number. Floats
  may differ by the relative tolerance (or absolutely by a thousandth of it); nan equals nan. Sets
  and dict keys must be equal exactly.
- Standard output: equal after stripping the ends; else the same tokens, by the layout of the test's
  rules, each the same text or the same number. A number is an integer or a decimal without leading
  zeros, and numbers are compared exactly, as decimals. The tolerance is that of the test; a test
  without one uses the relative tolerance of the configuration, which excludes expected integers.
- A checker function, if one is configured, decides alone for both kinds. It is trusted code of the
  person who runs the verifier: the configuration names it, a request cannot. It runs here, not in
  the jail.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal
from itertools import repeat, zip_longest
from typing import Any

from async_rl.config.plugins import CHECKER, load_function
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import CallTest, OutputRules, StdinTest
from async_rl.sandbox.values import unwrapped

Checker = Callable[[Any, Any, Any], bool]
"""(input text or list of arguments, program's output, expected output) -> True if it passes."""
_ABSOLUTE_SHARE = 1e-3
_MAX_TOKEN_CHARS = 400
"""A longer token is compared as a text, so that reading numbers takes linear time."""
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
"""Leading zeros make a token a text: 0011 is a string of bits, not 11."""
_EXACT = Context(prec=2 * _MAX_TOKEN_CHARS)
_PLAIN = OutputRules()
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rules above.

    relative_tolerance: of floats where the problem states none, 0 for exact equality; checker:
    decides instead of the rules.
    """

    relative_tolerance: float
    checker: Checker | None

    def passes_value(self, test: CallTest, value: Any) -> bool:
        """True if a returned value is right. Raises InfrastructureError if the checker fails."""
        if self.checker is not None:
            return _ask(self.checker, test.args, value, test.expected)
        return self.values_equal(value, test.expected, test.types)

    def passes_output(self, test: StdinTest, output: str) -> bool:
        """Return whether an output is right. Raises InfrastructureError if the checker fails."""
        if self.checker is not None:
            return _ask(self.checker, test.input, output, test.output)
        return self.outputs_equal(output, test.output, test.rules)

    def values_equal(self, value: Any, expected: Any, types: str = "exact") -> bool:
        """Return whether two values are equal, types included as `types` of the test asks."""
        if types == "json":
            return self._equal(unwrapped(value), expected, True)
        return self._equal(value, expected, False)

    def _equal(self, value: Any, expected: Any, is_json: bool) -> bool:
        kind = type(expected)
        if is_json and type(value) is tuple:
            value = list(value)
        if is_json and kind is not type(value) and {kind, type(value)} == {int, float}:
            return bool(value == expected)
        if type(value) is not kind:
            return False
        if kind is list or kind is tuple:
            return len(value) == len(expected) and all(
                self._equal(item, wanted, is_json)
                for item, wanted in zip(value, expected, strict=True)
            )
        if kind is dict:
            keys = _typed(value)
            return len(value) == len(expected) and all(
                (type(key), key) in keys and self._equal(value[key], expected[key], is_json)
                for key in expected
            )
        if kind is float:
            return self._floats_equal(value, expected)
        if kind is set or kind is frozenset:
            return _typed(value) == _typed(expected)
        return bool(value == expected)

    def _floats_equal(self, value: float, expected: float) -> bool:
        if value == expected or (math.isnan(value) and math.isnan(expected)):
            return True
        tolerance = self.relative_tolerance
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=_ABSOLUTE_SHARE * tolerance)

    def outputs_equal(self, output: str, expected: str, rules: OutputRules = _PLAIN) -> bool:
        """Return whether two outputs are equal by the rules for text.

        Reads both line by line, so that a wrong output costs no more than its right part.
        """
        if output == expected:
            return True
        if rules.layout == "exact":
            return rules.ignores_case and output.casefold() == expected.casefold()
        split = _lines if rules.layout == "lines" else _one_line
        for tokens, wanted in zip_longest(split(output), split(expected)):
            if tokens is None or wanted is None or len(tokens) != len(wanted):
                return False
            if tokens != wanted and not all(map(self._tokens_equal, tokens, wanted, repeat(rules))):
                return False
        return True

    def _tokens_equal(self, token: str, expected: str, rules: OutputRules) -> bool:
        if token == expected or (rules.ignores_case and token.casefold() == expected.casefold()):
            return True
        left, right = _number(token), _number(expected)
        if left is None or right is None:
            return False
        relative, absolute = rules.relative_tolerance, rules.absolute_tolerance
        if not relative and not absolute and not _INTEGER.fullmatch(expected):
            relative = self.relative_tolerance
        if left == right:
            return True
        difference = _EXACT.abs(_EXACT.subtract(left, right))
        bound = max(Decimal(absolute), _EXACT.multiply(Decimal(relative), _EXACT.abs(right)))
        return difference <= bound


def _lines(text: str) -> Iterator[list[str]]:
    """The tokens of each line, without the empty lines at both ends."""
    text = text.strip()
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].split()
        start = end + 1


def _one_line(text: str) -> Iterator[list[str]]:
    for tokens in _lines(text):
        yield from ([token] for token in tokens)


def _number(token: str) -> Decimal | None:
    if len(token) > _MAX_TOKEN_CHARS or not _NUMBER.fullmatch(token):
        return None
    return _EXACT.create_decimal(token)


def _typed(items: Any) -> set[tuple[type, Any]]:
    """The items with their types, because True == 1 == 1.0."""
    return {(type(item), item) for item in items}


def load_checker(name: str | None) -> Checker | None:
    """The function that `sandbox.checker` names, as module:function. Raises ConfigError."""
    if name is None:
        return None
    return load_function("sandbox.checker", name, CHECKER)


def _ask(checker: Checker, given: Any, value: Any, expected: Any) -> bool:
    try:
        answer = checker(given, value, expected)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RecursionError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise InfrastructureError(
            f"the checker raised {type(error).__name__}: {str(error)[:200]}; correct"
            " sandbox.checker"
        ) from error
    if type(answer) is not bool:
        raise InfrastructureError(
            f"the checker returned {shorten(answer)}, not True or False; correct sandbox.checker"
        )
    return answer


def shorten(value: Any) -> str:
    """A value for a message: printable, at most about a hundred characters."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more digits than Python converts to decimal
        return f"a {type(value).__name__} with an integer of more than 4300 digits"
    return text[:160].encode("ascii", "backslashreplace").decode()
