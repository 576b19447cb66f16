"""The metrics of a run: as columns, and row by row while the run writes them."""

import array
import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from async_rl.core.records import lines_backwards
from async_rl.core.types import DoubleArray

STEP = "step"


class RowReader:
    """Reads `metrics.jsonl`, also while the run appends to it or cuts off its end.

    After a restart of the learner from a checkpoint the rows since then are cut off: these steps
    are trained and reported again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        # Hashes and not lines, because the rows of a long run are hundreds of megabytes.
        self._known: set[int] = set()

    def new(self) -> Iterator[dict[str, float]]:
        """Yield the complete rows that were not yielded before."""
        lines = lines_backwards(self._path) if self._known else ()
        # A file whose end was cut off has other lines after the last one that is known.
        ends = (start + len(line) + 1 for start, line in lines if hash(line) in self._known)
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(next(ends, 0))
            for line in file:
                row = _row(line) if line.endswith(b"\n") else {}
                if row:
                    self._known.add(hash(line[:-1]))
                    yield row


class Curves:
    """Columns of metrics.jsonl, float64 [rows]. A step that is trained again replaces its row.

    Safe for threads.
    """

    # Columns instead of rows: a hundred thousand rows of eighty names are 64 MB as columns and
    # about a gigabyte as dictionaries.

    def __init__(self, run_dir: Path) -> None:
        self._reader = RowReader(run_dir)
        self._lock = threading.Lock()
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array.array[float]] = {}

    def refresh(self) -> None:
        """Read the rows that were written since the last call."""
        with self._lock:
            for row in self._reader.new():
                self._put(row)

    @property
    def names(self) -> list[str]:
        """The metrics that at least one row has, without the step and its time."""
        return sorted(self._columns.keys() - {STEP, "time_s"})

    def columns(self) -> dict[str, DoubleArray]:
        """Return a copy of all columns."""
        with self._lock:
            return {name: np.array(column) for name, column in self._columns.items()}

    def points(self, name: str, *, x: str = STEP) -> tuple[DoubleArray, DoubleArray]:
        """Return x [n] and the metric's values [n] of the rows that have both, in order of x."""
        with self._lock:
            if name not in self._columns or x not in self._columns:
                return np.empty(0), np.empty(0)
            both = np.array([self._columns[x], self._columns[name]])
        both = both[:, np.isfinite(both).all(axis=0)]
        # Step 0 has an evaluation only, which may be written after step 1.
        xs, values = both[:, np.argsort(both[0], kind="stable")]
        return xs, values

    def _put(self, row: Mapping[str, float]) -> None:
        num_rows = len(self._row_of)
        # A step that is trained again after a crash replaces its first row.
        position = self._row_of.setdefault(int(row[STEP]), num_rows)
        for name in row:
            if name not in self._columns:
                self._columns[name] = array.array("d", [math.nan]) * num_rows
        for name, column in self._columns.items():
            # Behind the last row a slice appends.
            column[position : position + 1] = array.array("d", [row.get(name, math.nan)])


def newest_rows(run_dir: Path, first_step: int) -> dict[int, dict[str, float]]:
    """Return the rows from this step on, by step, however long the file is."""
    rows = itertools.takewhile(lambda row: row["step"] >= first_step, _backwards(run_dir))
    # The newest row of a step comes last and replaces older rows.
    return {int(row["step"]): row for row in reversed(list(rows))}


def newest_row(run_dir: Path) -> dict[str, float]:
    """Return the last complete row; empty if there is none."""
    return next(_backwards(run_dir), {})


def _backwards(run_dir: Path) -> Iterator[dict[str, float]]:
    rows = (_row(line) for _, line in lines_backwards(run_dir / "metrics.jsonl"))
    return filter(None, rows)


def _row(line: bytes) -> dict[str, float]:
    """Return one row without the metrics that the step did not report, which may be null; empty if
    the line is damaged.
    """
    try:
        values = msgspec.json.decode(line, type=dict[str, int | float | None])
    except msgspec.DecodeError:
        return {}
    return {name: value for name, value in values.items() if value is not None}
