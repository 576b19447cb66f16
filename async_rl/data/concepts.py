"""Phrases, code and typical errors (flaws) of the embedded task's filters, maps and reductions.

The table is concepts.toml, which also says what its lines mean. A change of it changes the cached
model's key.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import msgspec


class Concept(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One part of a spec: two phrases for it, its code, its flaws."""

    phrases: tuple[str, str]
    code: str
    flaws: tuple[str, ...]

    @property
    def run(self) -> Callable[[Any], Any]:
        """The code as a function of its variable."""
        return _FUNCTIONS[self.code]


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    filters: tuple[Concept, ...]
    maps: tuple[Concept, ...]
    reductions: tuple[Concept, ...]
    templates: tuple[str, ...]


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "x % 2 == 0": lambda x: x % 2 == 0,
    "x % 2 == 1": lambda x: x % 2 == 1,
    "x > 0": lambda x: x > 0,
    "x < 0": lambda x: x < 0,
    "x > 3": lambda x: x > 3,
    "x >= 5": lambda x: x >= 5,
    "x < 4": lambda x: x < 4,
    "x <= 2": lambda x: x <= 2,
    "x % 3 == 0": lambda x: x % 3 == 0,
    "x % 3 != 0": lambda x: x % 3 != 0,
    "x % 3 == 1": lambda x: x % 3 == 1,
    "x % 4 == 0": lambda x: x % 4 == 0,
    "x != 0": lambda x: x != 0,
    "x != 6": lambda x: x != 6,
    "2 <= x <= 9": lambda x: 2 <= x <= 9,
    "abs(x) > 6": lambda x: abs(x) > 6,
    "abs(x) < 5": lambda x: abs(x) < 5,
    "x % 2 == 1 and x > 0": lambda x: x % 2 == 1 and x > 0,
    "x % 2 == 0 or x < 0": lambda x: x % 2 == 0 or x < 0,
    "x * 2": lambda x: x * 2,
    "x * 3": lambda x: x * 3,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "-x": lambda x: -x,
    "abs(x)": abs,
    "x + 1": lambda x: x + 1,
    "x - 1": lambda x: x - 1,
    "x + 5": lambda x: x + 5,
    "x - 4": lambda x: x - 4,
    "10 - x": lambda x: 10 - x,
    "x // 2": lambda x: x // 2,
    "x // 3": lambda x: x // 3,
    "x % 3": lambda x: x % 3,
    "x % 7": lambda x: x % 7,
    "x * 2 + 1": lambda x: x * 2 + 1,
    "x ** 2 - 1": lambda x: x**2 - 1,
    "abs(x - 7)": lambda x: abs(x - 7),
    "max(x, 0)": lambda x: max(x, 0),
    "min(x, 8)": lambda x: min(x, 8),
    "sum(ys)": sum,
    "sum(ys) * 2": lambda ys: sum(ys) * 2,
    "sum(ys) % 10": lambda ys: sum(ys) % 10,
    "-sum(ys)": lambda ys: -sum(ys),
    "sum(y * y for y in ys)": lambda ys: sum(y * y for y in ys),
    "max(ys, default=0)": lambda ys: max(ys, default=0),
    "min(ys, default=0)": lambda ys: min(ys, default=0),
    "len(set(ys))": lambda ys: len(set(ys)),
    "sum(y > 4 for y in ys)": lambda ys: sum(y > 4 for y in ys),
    "ys[0] if ys else 0": lambda ys: ys[0] if ys else 0,
    "ys[-1] if ys else 0": lambda ys: ys[-1] if ys else 0,
    "ys[:3]": lambda ys: ys[:3],
    "ys[-2:]": lambda ys: ys[-2:],
    "ys[1:]": lambda ys: ys[1:],
    "ys[:-1]": lambda ys: ys[:-1],
    "ys[::2]": lambda ys: ys[::2],
    "ys[::-1]": lambda ys: ys[::-1],
    "sorted(ys)": sorted,
    "sorted(ys)[::-1]": lambda ys: sorted(ys)[::-1],
    "sorted(set(ys))": lambda ys: sorted(set(ys)),
}
"""Each code as a function of `x` or `ys`. Written out, because nothing outside the jail evaluates
text; a test compares them with the code.
"""

_TABLES = msgspec.toml.decode(
    resources.files(__package__).joinpath("concepts.toml").read_bytes(), type=_Tables
)
FILTERS = _TABLES.filters
MAPS = _TABLES.maps
REDUCTIONS = _TABLES.reductions
TEMPLATES = _TABLES.templates

PROGRAM = "def f(xs):\n    ys = [{map} for x in xs if {filter}]\n    return {reduction}"
"""The form of a solution in the corpus: complete source of `f`, which runs as it is."""
