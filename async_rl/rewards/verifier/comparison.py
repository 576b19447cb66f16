"""When a value or a text that a program emitted counts as the expected one. All values are plain
and decoded; none runs code.

Rules
- Call tests compare exact types all the way down: True is not 1, 1 is not 1.0, a list is not a
  tuple, a Counter is not a dict. Floats may differ by the relative tolerance (or absolutely by a
  thousandth of it); nan counts as nan.  Sets and dict keys must be equal exactly.
- Standard output: equal after stripping the ends; else equal line by line without outer blanks and
  trailing empty lines; else the same number of tokens per line, each equal or both numbers within
  the relative tolerance.  Never a set of words.
- A checker function, if one is configured, decides alone for both kinds.  It is trusted code of
  whoever runs the verifier: it is named in the configuration and never in a request, and runs here,
  not in the jail.
Used by `judging.py`.
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
"""(input text or list of arguments, what the program gave, what was expected) -> whether it passes.
"""
_ABSOLUTE_SHARE = 1e-3
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rules above. relative_tolerance: of floats, 0 = exact; checker: decides instead of the
    rules, None = the rules decide.
    """

    relative_tolerance: float
    checker: Checker | None

    def passes_value(self, test: CallTest, got: Any) -> bool:
        """True if a returned value is the expected one. Raises InfrastructureError if the checker
        fails.
        """
        if self.checker is not None:
            return _ask(self.checker, test.args, got, test.expected)
        return self.values_equal(got, test.expected)

    def passes_output(self, test: StdinTest, got: str) -> bool:
        """True if what a program printed is the expected output. Raises InfrastructureError if the
        checker fails.
        """
        if self.checker is not None:
            return _ask(self.checker, test.input, got, test.output)
        return self.outputs_equal(got, test.output)

    def values_equal(self, got: Any, expected: Any) -> bool:
        """True if two plain values are equal, exact types included."""
        kind = type(expected)
        if type(got) is not kind:
            return False
        if kind is list or kind is tuple:
            return len(got) == len(expected) and all(map(self.values_equal, got, expected))
        if kind is dict:
            keys = {(type(key), key) for key in got}
            return len(got) == len(expected) and all(
                (type(key), key) in keys and self.values_equal(got[key], expected[key])
                for key in expected
            )
        if kind is float:
            return self._floats_equal(got, expected)
        if kind is set or kind is frozenset:
            return {(type(item), item) for item in got} == {(type(item), item) for item in expected}
        return bool(got == expected)

    def _floats_equal(self, got: float, expected: float) -> bool:
        if got == expected or (math.isnan(got) and math.isnan(expected)):
            return True
        tolerance = self.relative_tolerance
        return math.isclose(got, expected, rel_tol=tolerance, abs_tol=_ABSOLUTE_SHARE * tolerance)

    def outputs_equal(self, got: str, expected: str) -> bool:
        """True if two outputs are equal by the rules for text."""
        got, expected = got.strip(), expected.strip()
        if got == expected:
            return True
        got_lines = [line.strip() for line in got.splitlines()]
        expected_lines = [line.strip() for line in expected.splitlines()]
        return len(got_lines) == len(expected_lines) and all(
            map(self._lines_equal, got_lines, expected_lines)
        )

    def _lines_equal(self, got: str, expected: str) -> bool:
        if got == expected:
            return True
        got_tokens, expected_tokens = got.split(), expected.split()
        return len(got_tokens) == len(expected_tokens) and all(
            map(self._tokens_equal, got_tokens, expected_tokens)
        )

    def _tokens_equal(self, got: str, expected: str) -> bool:
        if got == expected:
            return True
        if len(got) > 400 or len(expected) > 400 or "_" in got:
            return False
        try:
            left, right = float(got), float(expected)
        except ValueError:
            return False
        if not (math.isfinite(left) and math.isfinite(right)):
            return False
        if _is_integer(got) and _is_integer(expected):
            return int(got) == int(expected)
        return math.isclose(left, right, rel_tol=self.relative_tolerance)


def _is_integer(token: str) -> bool:
    return token.lstrip("+-").isdecimal()


def load_checker(name: str | None) -> Checker | None:
    """The function that `sandbox.checker` names, as module:function. Raises ConfigError."""
    if name is None:
        return None
    return load_function("sandbox.checker", name, "input", "got", "expected")


def _ask(checker: Checker, given: Any, got: Any, expected: Any) -> bool:
    try:
        answer = checker(given, got, expected)
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
            f"the checker gave {shorten(answer)}, not True or False; correct sandbox.checker"
        )
    return answer


def shorten(value: Any) -> str:
    """A value for a message: at most about a hundred characters, printable."""
    return _repr.repr(value)[:160].encode("ascii", "backslashreplace").decode()
