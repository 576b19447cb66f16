"""When a value or a text that a program emitted counts as the expected one. Pure; all values are plain and decoded, none runs code.

Rules
- Call tests compare exact types all the way down: True is not 1, 1 is not 1.0, a list is not a tuple, a Counter is not a dict.
  Floats may differ by 1e-9 relatively (or 1e-12 absolutely); nan counts as nan.  Sets and dict keys must be equal exactly.
- Standard output: equal after stripping the ends; else equal line by line without outer blanks and trailing empty lines; else the same
  number of tokens per line, each equal or both numbers within 1e-9 relatively.  Never a set of words.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any

RELATIVE_TOLERANCE = 1e-9
ABSOLUTE_TOLERANCE = 1e-12
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def values_equal(got: Any, expected: Any) -> bool:
    """True if a returned value is the expected one, exact types included."""
    kind = type(expected)
    if type(got) is not kind:
        return False
    if kind is list or kind is tuple:
        return len(got) == len(expected) and all(map(values_equal, got, expected))
    if kind is dict:
        keys = {(type(key), key) for key in got}
        return len(got) == len(expected) and all((type(key), key) in keys and values_equal(got[key], expected[key]) for key in expected)
    if kind is float:
        return _floats_equal(got, expected)
    if kind is set or kind is frozenset:
        return {(type(item), item) for item in got} == {(type(item), item) for item in expected}
    return bool(got == expected)


def _floats_equal(got: float, expected: float) -> bool:
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return True
    return math.isclose(got, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def outputs_equal(got: str, expected: str) -> bool:
    """True if what a program printed is the expected output."""
    got, expected = got.strip(), expected.strip()
    if got == expected:
        return True
    got_lines = [line.strip() for line in got.splitlines()]
    expected_lines = [line.strip() for line in expected.splitlines()]
    return len(got_lines) == len(expected_lines) and all(map(_lines_equal, got_lines, expected_lines))


def _lines_equal(got: str, expected: str) -> bool:
    if got == expected:
        return True
    got_tokens, expected_tokens = got.split(), expected.split()
    return len(got_tokens) == len(expected_tokens) and all(map(_tokens_equal, got_tokens, expected_tokens))


def _tokens_equal(got: str, expected: str) -> bool:
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
    return math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE)


def _is_integer(token: str) -> bool:
    return token.lstrip("+-").isdecimal()


def shorten(value: Any) -> str:
    """A value for a message: at most about a hundred characters, printable."""
    return _repr.repr(value)[:160].encode("ascii", "backslashreplace").decode()
