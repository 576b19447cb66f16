"""How printed text is compared: the rules, and a checker in their place. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

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
    as tests are, and runs in the jail (sandbox/checker.py has the forms). interacts: it runs next
    to the program, reads what the program prints, and prints what the program reads.
    """

    code: str
    form: Literal["kattis", "testlib", "printed"]
    language: Literal["python", "cpp"] = PYTHON
    interacts: bool = False

    def __post_init__(self) -> None:
        if (self.form == "printed" or self.interacts) and self.language != PYTHON:
            raise ValueError("a checker that interacts or prints is a program in Python")
        if self.form == "printed" and self.interacts:
            raise ValueError("a checker that interacts has the form kattis or testlib")
