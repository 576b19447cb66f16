"""Phrases, code and typical errors (flaws) of the embedded task's filters, maps and reductions.

Invariants: `code` is a condition or an expression in `x`, of a reduction in `ys`; `run` computes
the same. Reductions accept the empty list and return JSON values (integers within 64 bits). A flaw
is code of the same shape with other values. A change here changes the cached model's key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Concept:
    """One part of a spec: two phrases for it, its code, the code as a function, its flaws."""

    phrases: tuple[str, str]
    code: str
    run: Callable[[Any], Any]
    flaws: tuple[str, ...]


def _row(phrases: str, code: str, run: Callable[[Any], Any], flaws: str) -> Concept:
    first, second = phrases.split(" | ")
    return Concept((first, second), code, run, tuple(flaws.split(" | ")))


FILTERS: tuple[Concept, ...] = (
    _row(
        "that are even | divisible by 2",
        "x % 2 == 0",
        lambda x: x % 2 == 0,
        "x % 2 == 1 | x // 2 == 0",
    ),
    _row("that are odd | not divisible by 2", "x % 2 == 1", lambda x: x % 2 == 1, "x % 2 == 0"),
    _row(
        "that are positive | above zero", "x > 0", lambda x: x > 0, "x < 0 | x >= 1 and x % 2 == 1"
    ),
    _row("that are negative | below zero", "x < 0", lambda x: x < 0, "x > 0 | x <= 0"),
    _row("greater than 3 | above 3", "x > 3", lambda x: x > 3, "x >= 3 | x < 3"),
    _row("that are at least 5 | not below 5", "x >= 5", lambda x: x >= 5, "x > 5 | x <= 5"),
    _row("less than 4 | under 4", "x < 4", lambda x: x < 4, "x <= 4 | x > 4"),
    _row("that are at most 2 | not above 2", "x <= 2", lambda x: x <= 2, "x < 2 | x >= 2"),
    _row(
        "divisible by 3 | that are multiples of 3",
        "x % 3 == 0",
        lambda x: x % 3 == 0,
        "x % 3 == 1 | x // 3 == 0",
    ),
    _row(
        "not divisible by 3 | that are no multiples of 3",
        "x % 3 != 0",
        lambda x: x % 3 != 0,
        "x % 3 == 0 | x % 3 == 1",
    ),
    _row(
        "with remainder 1 by 3 | one above a multiple of 3",
        "x % 3 == 1",
        lambda x: x % 3 == 1,
        "x % 3 == 2 | x % 3 == 0",
    ),
    _row(
        "divisible by 4 | that are multiples of 4",
        "x % 4 == 0",
        lambda x: x % 4 == 0,
        "x % 4 == 2 | x % 2 == 0",
    ),
    _row("other than zero | that are nonzero", "x != 0", lambda x: x != 0, "x > 0 | x == 0"),
    _row("other than 6 | different from 6", "x != 6", lambda x: x != 6, "x == 6 | x > 6"),
    _row(
        "from 2 to 9 | between 2 and 9 inclusive",
        "2 <= x <= 9",
        lambda x: 2 <= x <= 9,
        "2 < x < 9 | x <= 9",
    ),
    _row(
        "with absolute value above 6 | further than 6 from zero",
        "abs(x) > 6",
        lambda x: abs(x) > 6,
        "x > 6 | abs(x) >= 6",
    ),
    _row(
        "with absolute value below 5 | closer than 5 to zero",
        "abs(x) < 5",
        lambda x: abs(x) < 5,
        "x < 5 | abs(x) <= 5",
    ),
    _row(
        "that are odd and positive | above zero and not divisible by 2",
        "x % 2 == 1 and x > 0",
        lambda x: x % 2 == 1 and x > 0,
        "x % 2 == 1 or x > 0 | x % 2 == 0 and x > 0",
    ),
    _row(
        "that are even or negative | below zero or divisible by 2",
        "x % 2 == 0 or x < 0",
        lambda x: x % 2 == 0 or x < 0,
        "x % 2 == 0 and x < 0 | x % 2 == 1 or x < 0",
    ),
)

MAPS: tuple[Concept, ...] = (
    _row("double each | multiply each by 2", "x * 2", lambda x: x * 2, "x + 2 | x ** 2"),
    _row("triple each | multiply each by 3", "x * 3", lambda x: x * 3, "x + 3 | x ** 3"),
    _row("square each | multiply each by itself", "x ** 2", lambda x: x**2, "x * 2 | x ** 3"),
    _row("cube each | raise each to the third power", "x ** 3", lambda x: x**3, "x * 3 | x ** 2"),
    _row("negate each | flip the sign of each", "-x", lambda x: -x, "abs(x) | 1 - x"),
    _row("take the absolute value of each | drop the sign of each", "abs(x)", abs, "-x | x"),
    _row("increase each by 1 | add one to each", "x + 1", lambda x: x + 1, "x - 1 | x + 2"),
    _row("decrease each by 1 | subtract one from each", "x - 1", lambda x: x - 1, "x + 1 | 1 - x"),
    _row("increase each by 5 | add 5 to each", "x + 5", lambda x: x + 5, "x * 5 | x - 5"),
    _row("decrease each by 4 | subtract 4 from each", "x - 4", lambda x: x - 4, "4 - x | x + 4"),
    _row(
        "subtract each from 10 | replace each by 10 minus it",
        "10 - x",
        lambda x: 10 - x,
        "x - 10 | 10 + x",
    ),
    _row(
        "halve each rounding down | floor each divided by 2",
        "x // 2",
        lambda x: x // 2,
        "x / 2 | x % 2",
    ),
    _row(
        "divide each by 3 rounding down | floor a third of each",
        "x // 3",
        lambda x: x // 3,
        "x / 3 | x % 3",
    ),
    _row(
        "take each modulo 3 | reduce each to its remainder by 3",
        "x % 3",
        lambda x: x % 3,
        "x // 3 | x % 2",
    ),
    _row(
        "take each modulo 7 | reduce each to its remainder by 7",
        "x % 7",
        lambda x: x % 7,
        "x // 7 | x % 8",
    ),
    _row(
        "double each and add one | turn each into one more than its double",
        "x * 2 + 1",
        lambda x: x * 2 + 1,
        "x * 2 - 1 | x + 2 + 1",
    ),
    _row(
        "square each and subtract one | turn each into one less than its square",
        "x ** 2 - 1",
        lambda x: x**2 - 1,
        "x ** 2 + 1 | x * 2 - 1",
    ),
    _row(
        "replace each by its distance to 7 | measure how far each is from 7",
        "abs(x - 7)",
        lambda x: abs(x - 7),
        "x - 7 | 7 - x",
    ),
    _row(
        "raise the negative ones to zero | replace those below zero by zero",
        "max(x, 0)",
        lambda x: max(x, 0),
        "min(x, 0) | abs(x)",
    ),
    _row(
        "cap each at 8 | lower those above 8 to 8",
        "min(x, 8)",
        lambda x: min(x, 8),
        "max(x, 8) | x - 8",
    ),
)

REDUCTIONS: tuple[Concept, ...] = (
    _row("their sum | the total", "sum(ys)", sum, "len(ys) | max(ys)"),
    _row(
        "twice their sum | the doubled total",
        "sum(ys) * 2",
        lambda ys: sum(ys) * 2,
        "sum(ys) ** 2 | sum(ys) + 2",
    ),
    _row(
        "their sum modulo 10 | the last digit of the total",
        "sum(ys) % 10",
        lambda ys: sum(ys) % 10,
        "sum(ys) // 10 | sum(ys)",
    ),
    _row(
        "their negated sum | minus the total", "-sum(ys)", lambda ys: -sum(ys), "sum(ys) | -len(ys)"
    ),
    _row(
        "the sum of their squares | the total of the squared values",
        "sum(y * y for y in ys)",
        lambda ys: sum(y * y for y in ys),
        "sum(ys) ** 2 | sum(y * 2 for y in ys)",
    ),
    _row(
        "the largest or 0 if none | the maximum with 0 as default",
        "max(ys, default=0)",
        lambda ys: max(ys, default=0),
        "max(ys) | min(ys, default=0)",
    ),
    _row(
        "the smallest or 0 if none | the minimum with 0 as default",
        "min(ys, default=0)",
        lambda ys: min(ys, default=0),
        "min(ys) | max(ys, default=0)",
    ),
    _row(
        "the number of distinct values | how many different values occur",
        "len(set(ys))",
        lambda ys: len(set(ys)),
        "len(ys) | set(ys)",
    ),
    _row(
        "how many are above 4 | the number of values over 4",
        "sum(y > 4 for y in ys)",
        lambda ys: sum(y > 4 for y in ys),
        "sum(y < 4 for y in ys) | len(ys)",
    ),
    _row(
        "the first or 0 if none | the one in front with 0 as default",
        "ys[0] if ys else 0",
        lambda ys: ys[0] if ys else 0,
        "ys[-1] if ys else 0 | ys[0]",
    ),
    _row(
        "the last or 0 if none | the one at the end with 0 as default",
        "ys[-1] if ys else 0",
        lambda ys: ys[-1] if ys else 0,
        "ys[0] if ys else 0 | ys[-1]",
    ),
    _row(
        "the first three | the leading three in a list",
        "ys[:3]",
        lambda ys: ys[:3],
        "ys[3:] | ys[-3:]",
    ),
    _row(
        "the last two | the trailing two in a list",
        "ys[-2:]",
        lambda ys: ys[-2:],
        "ys[2:] | ys[:2]",
    ),
    _row(
        "all but the first | the list without its head",
        "ys[1:]",
        lambda ys: ys[1:],
        "ys[:-1] | ys[:1]",
    ),
    _row(
        "all but the last | the list without its tail",
        "ys[:-1]",
        lambda ys: ys[:-1],
        "ys[1:] | ys[-1:]",
    ),
    _row(
        "every second one | those at even positions",
        "ys[::2]",
        lambda ys: ys[::2],
        "ys[1::2] | ys[:2]",
    ),
    _row(
        "the list reversed | the list from back to front",
        "ys[::-1]",
        lambda ys: ys[::-1],
        "ys | sorted(ys)",
    ),
    _row(
        "the list sorted | the values in ascending order",
        "sorted(ys)",
        sorted,
        "ys | sorted(ys)[::-1]",
    ),
    _row(
        "the list sorted downwards | the values in descending order",
        "sorted(ys)[::-1]",
        lambda ys: sorted(ys)[::-1],
        "sorted(ys) | ys[::-1]",
    ),
    _row(
        "the distinct values sorted | the different values in ascending order",
        "sorted(set(ys))",
        lambda ys: sorted(set(ys)),
        "sorted(ys) | set(ys)",
    ),
)

TEMPLATES: tuple[str, ...] = (
    "Keep the numbers {filter}, {map} and return {reduction}.",
    "Of the numbers {filter}: {map}, then give {reduction}.",
    "Take the numbers {filter}. Then {map}. Return {reduction}.",
    "Compute {reduction} after you {map}, using only numbers {filter}.",
)
"""Word orders of a spec, with one phrase of each concept."""

PROGRAM = "def f(xs):\n    ys = [{map} for x in xs if {filter}]\n    return {reduction}"
"""The form in which the corpus writes a solution: complete source of `f`, which runs as it is."""
