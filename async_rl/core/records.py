"""Files of typed rows: records of a run, which only grow, and tables of the package.

A record is one JSON object per line. A line that its writer did not finish is not part of the file.
Long files are read from their end, so that the time does not depend on their length.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import msgspec

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import T

BLOCK_BYTES = 2**16


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


def read(path: Path, row: type[T]) -> Iterator[T]:
    """Yield the rows, oldest first; nothing if the file does not exist."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield msgspec.json.decode(line, type=row)
        except msgspec.DecodeError:
            continue  # half a line, which only a power loss leaves


def lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where each complete line starts, and the line, the last one first. A file that does not
    exist has none.
    """
    # The bytes after the last line break are not a complete line.
    return itertools.islice(_parts_backwards(path), 1, None)


def _parts_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where each part between line breaks starts, and the part, the last one first."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        # From the end, since the metrics of a long run are hundreds of megabytes.
        start = end = file.seek(0, os.SEEK_END)
        rest = b""
        while start > 0:
            size = min(start, BLOCK_BYTES)
            start -= size
            file.seek(start)
            # The bytes before the first break belong to a line that starts in an earlier block.
            rest, *parts = (file.read(size) + rest).split(b"\n")
            for part in reversed(parts):
                end -= len(part)
                yield end, part
                end -= 1
        yield 0, rest


def line_number(path: Path, offset: int) -> int:
    """The number of the line at this offset, counted from 1."""
    with path.open("rb") as file:
        return 1 + file.read(offset).count(b"\n")


def read_packaged(package: str, name: str, kind: type[T]) -> T:
    """Return a toml or yaml file of this package. Raises msgspec.ValidationError with the path."""
    decode = msgspec.toml.decode if name.endswith(".toml") else msgspec.yaml.decode
    return decode(resources.files(package).joinpath(name).read_bytes(), type=kind)
