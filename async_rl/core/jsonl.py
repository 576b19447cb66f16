"""Files of one JSON object per line, read from their end, so that the time does not depend on their
length.

A line that its writer did not finish is not part of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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
