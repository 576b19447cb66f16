"""Records of a run: files of one JSON object per line that only grow.

A line that its writer did not finish is not part of the file. Long files are read from their end,
so that the time does not depend on their length.
"""

import os
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


BLOCK_BYTES = 2**16


def lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where each complete line starts, and the line, the last one first. A file that does not
    exist has none.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        # From the end, since the metrics of a long run are hundreds of megabytes.
        end = file.seek(0, os.SEEK_END)
        rest = b""
        has_line = False
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            if not has_line:
                # The bytes after the last line break are not a complete line.
                block = block[: block.rfind(b"\n") + 1]
                has_line = bool(block)
            block += rest
            # The bytes before the first break belong to a line that starts in an earlier block.
            first = block.find(b"\n") + 1 if start else 0
            rest = block[:first]
            whole = block[first:]
            offset = start + first + len(whole)
            for line in reversed(whole.split(b"\n")[:-1]):
                offset -= len(line) + 1
                yield offset, line
            end = start


def line_number(path: Path, offset: int) -> int:
    """The number of the line at this offset, counted from 1."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(min(BLOCK_BYTES, offset - file.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)
