"""Print the results of a benchmark: one figure per line.

`benchmarks/run.py` collects the figures into one table.
"""

from __future__ import annotations

MARK = "figure\t"


def figure(name: str, value: float, unit: str, *, goal: str = "") -> None:
    """Print one result. goal: the target as text; empty if there is none."""
    print(f"{MARK}{name}\t{value:.4g}\t{unit}\t{goal}", flush=True)


def with_table(text: str, name: str, content: str) -> str:
    """Return a page with the content between its marks `<!-- NAME: begin -->` and `end`. Raises
    ValueError if a mark is missing: a page without its end would lose what follows.
    """
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    start = text.index(begin) + len(begin)
    return text[:start] + content + text[text.index(end, start) :]
