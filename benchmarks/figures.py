"""Print the results of a benchmark: one figure per line.

`benchmarks/run.py` collects the figures into one table.
"""

from __future__ import annotations

MARK = "figure\t"


def figure(name: str, value: float, unit: str, *, goal: str = "") -> None:
    """Print one result. goal: the target as text; empty if there is none."""
    print(f"{MARK}{name}\t{value:.4g}\t{unit}\t{goal}", flush=True)
