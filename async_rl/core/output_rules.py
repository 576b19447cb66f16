"""How printed text is compared: the rules, a checker in their place, the names of contests. Pure.

`kattis FLAGS`: the default validator of the problem package format with its flags
(`case_sensitive`, `space_change_sensitive`, `float_tolerance E`, `float_relative_tolerance E`,
`float_absolute_tolerance E`). `codeforces NAME`: a standard checker of testlib, such as `wcmp` or
`rcmp6`. `livecodebench`: our own default, tokens line by line.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from async_rl.core.errors import DataError
from async_rl.core.frozen import Value
from async_rl.core.languages import PYTHON


class OutputRules(Value, frozen=True):
    """The rules of a problem for comparing printed text.

    layout: lines = the same tokens on each line, tokens = the same tokens in any layout, exact =
    the same characters. A number may differ by a tolerance, relative to the expected number or
    absolute; with 0 and 0 numbers are equal exactly.
    """

    layout: Literal["lines", "tokens", "exact"] = "lines"
    ignores_case: bool = False
    relative_tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.0
    absolute_tolerance: Annotated[float, Meta(ge=0)] = 0.0


class Checker(Value, frozen=True):
    """A program that decides about printed text, where several outputs are right. It is trusted
    as tests are, and runs in the jail (sandbox/checker.py has the forms).
    """

    code: str
    form: Literal["kattis", "testlib", "printed"]
    language: Literal["python", "cpp"] = PYTHON

    def __post_init__(self) -> None:
        if self.form == "printed" and self.language != PYTHON:
            raise ValueError("a checker of the form printed is a program in Python")


_TOKENS = OutputRules(layout="tokens")
_ANY_CASE = OutputRules(layout="tokens", ignores_case=True)


def _within(tolerance: float) -> OutputRules:
    return OutputRules(layout="tokens", relative_tolerance=tolerance, absolute_tolerance=tolerance)


_CODEFORCES = {
    "wcmp": _TOKENS,
    "ncmp": _TOKENS,
    "icmp": _TOKENS,
    "hcmp": _TOKENS,
    "lcmp": OutputRules(),
    "fcmp": OutputRules(layout="exact"),
    "yesno": _ANY_CASE,
    "nyesno": _ANY_CASE,
    "rcmp4": _within(1e-4),
    "rcmp6": _within(1e-6),
    "rcmp9": _within(1e-9),
    # testlib's own constant.
    "rcmp": OutputRules(layout="tokens", absolute_tolerance=1.5e-6),
    "dcmp": _within(1e-6),
}
_TOLERANCES = {
    "float_tolerance": ("relative_tolerance", "absolute_tolerance"),
    "float_relative_tolerance": ("relative_tolerance",),
    "float_absolute_tolerance": ("absolute_tolerance",),
}


def read_rules(text: str) -> OutputRules:
    """The rules that a row names. Raises DataError."""
    system, *words = text.split() or [""]
    if system == "livecodebench" and not words:
        return OutputRules()
    if system == "codeforces" and len(words) == 1 and words[0] in _CODEFORCES:
        return _CODEFORCES[words[0]]
    if system == "kattis":
        try:
            return _kattis(words)
        except (LookupError, ValueError, msgspec.ValidationError) as error:
            raise DataError(f"compare={text!r}: wrong flag or number: {error}") from error
    raise DataError(
        f"compare={text!r} is unknown; use livecodebench, kattis with its flags, or"
        f" codeforces with one of {', '.join(_CODEFORCES)}"
    )


def _kattis(words: list[str]) -> OutputRules:
    rest = iter(words)
    # The defaults of the problem package format, which its flags change.
    fields: dict[str, object] = {"layout": "tokens", "ignores_case": True}
    for flag in rest:
        if flag == "case_sensitive":
            fields["ignores_case"] = False
        elif flag == "space_change_sensitive":
            fields["layout"] = "exact"
        else:
            tolerance = float(next(rest, ""))
            fields.update(dict.fromkeys(_TOLERANCES[flag], tolerance))
    return msgspec.convert(fields, OutputRules)
