"""The recorded runs of a study: one file of benchmarks/results, one line per run.

A line is `{"run": NAME, "rows": [...]}`. A run that is recorded again replaces its line.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """One run of a study, which may not have run yet."""

    file: Path
    name: str

    def exists(self) -> bool:
        """Return whether the run was recorded."""
        return self.name in recorded(self.file)

    def rows(self) -> list[Row]:
        """Return its rows. Raises KeyError if it was not recorded."""
        return list(recorded(self.file)[self.name])

    def write(self, rows: Sequence[Row]) -> None:
        """Record the run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+") as file:
            # Several processes may run cells of one study.
            fcntl.flock(file, fcntl.LOCK_EX)
            runs = {**_read(self.file), self.name: list(rows)}
            lines = (json.dumps({"run": name, "rows": runs[name]}) for name in sorted(runs))
            text = "\n".join(lines) + "\n"
            file.truncate(0)
            file.write(text)


def recorded(file: Path) -> Mapping[str, list[Row]]:
    """Return the rows of every run of a study by its name, in order of names."""
    if not file.exists():
        return {}
    status = file.stat()
    return _parsed(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(file: Path, changed_ns: int, size: int) -> Mapping[str, list[Row]]:
    return _read(file)


def _read(file: Path) -> dict[str, list[Row]]:
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return {line["run"]: line["rows"] for line in lines}
