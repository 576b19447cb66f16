"""The metrics of one run as columns, read once and then only as far as the file grew."""

from __future__ import annotations

import array
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from async_rl.runs.metrics import RowReader

Floats = npt.NDArray[np.float64]
STEP, TIME = "step", "time_s"
_MISSING = math.nan


class Curves:
    """Columns of metrics.jsonl, float64 [rows]. A step that is trained again replaces its row.

    Columns instead of rows: a hundred thousand rows of eighty names are 64 MB as columns and about
    a gigabyte as dictionaries. Safe for threads.
    """

    def __init__(self, run_dir: Path) -> None:
        self._reader = RowReader(run_dir)
        self._lock = threading.Lock()
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array.array[float]] = {}

    def refresh(self) -> None:
        """Read what was written since the last call."""
        with self._lock:
            for row in self._reader.new():
                self._put(row)

    @property
    def names(self) -> list[str]:
        """The metrics that at least one row has, without the step and its time."""
        return sorted(self._columns.keys() - {STEP, TIME})

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None if no row has it."""
        values = self.points(name)[1]
        return float(values[-1]) if len(values) else None

    def points(self, name: str, *, x: str = STEP) -> tuple[Floats, Floats]:
        """Return x [n] and the metric's values [n] of the rows that have both, in order of x."""
        with self._lock:
            if name not in self._columns or x not in self._columns:
                return np.empty(0), np.empty(0)
            xs, values = np.array(self._columns[x]), np.array(self._columns[name])
        is_known = np.isfinite(values) & np.isfinite(xs)
        xs, values = xs[is_known], values[is_known]
        # Step 0 has an evaluation only, which may be written after step 1.
        order = np.argsort(xs, kind="stable")
        return xs[order], values[order]

    def _put(self, row: Mapping[str, float]) -> None:
        num_rows = len(self._row_of)
        position = self._row_of.setdefault(int(row[STEP]), num_rows)
        for name in row.keys() - self._columns.keys():
            self._columns[name] = array.array("d", [_MISSING]) * num_rows
        for name, column in self._columns.items():
            value = row.get(name, _MISSING)
            if position == num_rows:
                column.append(value)
            else:
                column[position] = value
