"""Records of a run: files of one JSON object per line that only grow.

A line that its writer did not finish is not part of the file. core/jsonl.py reads long files from
their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from async_rl.core.errors import InfrastructureError

Row = TypeVar("Row")


def append(path: Path, rows: Iterable[object]) -> None:
    """Add a line for each row. Raises InfrastructureError if the file cannot be written."""
    # One write: a process that is killed leaves all lines or none.
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    try:
        with path.open("ab") as file:
            file.write(lines)
    except OSError as error:
        raise InfrastructureError(
            f"{path} cannot be written: {error}; make room, then async-rl resume the run"
        ) from error


def read(path: Path, row: type[Row]) -> Iterator[Row]:
    """Yield the rows, oldest first; nothing if the file does not exist."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=row)
        except msgspec.DecodeError:
            continue  # half a line, which only a power loss leaves
