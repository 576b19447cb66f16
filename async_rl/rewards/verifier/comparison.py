"""Comparison of a value or a text that a program emitted with the expected one. All values are
plain and decoded; comparing them runs no code of the program.

Rules
- Call tests compare exact types at every level: True is not 1, 1 is not 1.0, a list is not a tuple,
  a Counter is not a dict. Floats may differ by the relative tolerance (or absolutely by a
  thousandth of it); nan equals nan. Sets and dict keys must be equal exactly.
- Standard output: equal after stripping the ends; else equal line by line without outer blanks and
  trailing empty lines; else the same number of tokens per line, each equal or both numbers within
  the relative tolerance. Never a set of words.
- A checker function, if one is configured, decides alone for both kinds. It is trusted code of the
  person who runs the verifier: the configuration names it, a request cannot. It runs here, not in
  the jail.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_rl.config.plugins import load_function
from async_rl.core.errors import InfrastructureError
from async_rl.core.types import CallTest, StdinTest

Checker = Callable[[Any, Any, Any], bool]
"""(input text or list of arguments, program's output, expected output) -> True if it passes."""
_ABSOLUTE_SHARE = 1e-3
_MAX_TOKEN_CHARS = 400
"""A longer token is not read as a number, because that takes quadratic time."""
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rules above.

    relative_tolerance: of floats, 0 for exact equality; checker: decides instead of the rules.
    """

    relative_tolerance: float
    checker: Checker | None

    def passes_value(self, test: CallTest, value: Any) -> bool:
        """True if a returned value is right. Raises InfrastructureError if the checker fails."""
        if self.checker is not None:
            return _ask(self.checker, test.args, value, test.expected)
        return self.values_equal(value, test.expected)

    def passes_output(self, test: StdinTest, output: str) -> bool:
        """Return whether an output is right. Raises InfrastructureError if the checker fails."""
        if self.checker is not None:
            return _ask(self.checker, test.input, output, test.output)
        return self.outputs_equal(output, test.output)

    def values_equal(self, value: Any, expected: Any) -> bool:
        """Return whether two plain values are equal, exact types included."""
        kind = type(expected)
        if type(value) is not kind:
            return False
        if kind is list or kind is tuple:
            return len(value) == len(expected) and all(map(self.values_equal, value, expected))
        if kind is dict:
            keys = _typed(value)
            return len(value) == len(expected) and all(
                (type(key), key) in keys and self.values_equal(value[key], expected[key])
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

    def outputs_equal(self, output: str, expected: str) -> bool:
        """Return whether two outputs are equal by the rules for text."""
        output, expected = output.strip(), expected.strip()
        if output == expected:
            return True
        lines, expected_lines = output.splitlines(), expected.splitlines()
        return len(lines) == len(expected_lines) and all(
            map(self._lines_equal, lines, expected_lines)
        )

    def _lines_equal(self, line: str, expected: str) -> bool:
        if line.strip() == expected.strip():
            return True
        tokens, expected_tokens = line.split(), expected.split()
        return len(tokens) == len(expected_tokens) and all(
            map(self._tokens_equal, tokens, expected_tokens)
        )

    def _tokens_equal(self, token: str, expected: str) -> bool:
        if token == expected:
            return True
        if max(len(token), len(expected)) > _MAX_TOKEN_CHARS or "_" in token:
            return False
        try:
            left, right = float(token), float(expected)
        except ValueError:
            return False
        if not (math.isfinite(left) and math.isfinite(right)):
            return False
        if _is_integer(token) and _is_integer(expected):
            return int(token) == int(expected)
        return math.isclose(left, right, rel_tol=self.relative_tolerance)


def _typed(items: Any) -> set[tuple[type, Any]]:
    """The items with their types, because True == 1 == 1.0."""
    return {(type(item), item) for item in items}


def _is_integer(token: str) -> bool:
    return token.lstrip("+-").isdecimal()


def load_checker(name: str | None) -> Checker | None:
    """The function that `sandbox.checker` names, as module:function. Raises ConfigError."""
    if name is None:
        return None
    return load_function("sandbox.checker", name, "input", "got", "expected")


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
    return _repr.repr(value)[:160].encode("ascii", "backslashreplace").decode()
