"""How a benchmark tells its results: one figure per line, which `benchmarks/run.py` gathers into
one table.
"""

from __future__ import annotations

MARK = "figure\t"


def figure(name: str, value: float, unit: str, *, goal: str = "") -> None:
    """Prints one result. goal: what it is to be compared with, in words; empty if nothing was
    promised.
    """
    print(f"{MARK}{name}\t{value:.4g}\t{unit}\t{goal}", flush=True)
