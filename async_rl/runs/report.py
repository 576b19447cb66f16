"""A report on runs: sentences, tables and graphs. Commands print it, the web view draws it."""

from async_rl.core.frozen import frozen
from async_rl.core.types import DoubleArray


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
