"""A report on runs: sentences, tables and graphs, and numbers as people read them. Commands print
it, the web view draws it.
"""

import math

from async_rl.core.frozen import frozen
from async_rl.core.types import DoubleArray
from async_rl.monitoring import status

_LARGE = 1e4
_SMALL = 1e-3


@frozen
class Table:
    """Cells as text, one tuple per row. columns: titles."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@frozen
class Series:
    """One line of a graph: float64 [n] each."""

    label: str
    xs: DoubleArray
    ys: DoubleArray


@frozen
class Graph:
    """Lines over a common axis, coloured in their order. meaning: of the values, for a hint."""

    title: str
    unit: str
    meaning: str
    series: tuple[Series, ...]


@frozen
class Section:
    """A part of a report: sentences, then a table, then graphs; each may be missing."""

    title: str = ""
    lines: tuple[str, ...] = ()
    table: Table | None = None
    graphs: tuple[Graph, ...] = ()


@frozen
class Report:
    """The result of a command about one run or two."""

    title: str
    sections: tuple[Section, ...]


def number(value: float | None) -> str:
    """Return a number as people read it: three or four digits, no exponent where none is needed."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= _LARGE:
        for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= scale:
                return f"{value / scale:.3g} {unit}"
    if 0 < size < _SMALL:
        return f"{value:.1e}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Return a time in the two largest units that it has; stages of a step are short, so times
    below ten seconds have a decimal.
    """
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 10 else status.duration(seconds)
