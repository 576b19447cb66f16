"""What the documents have in backquotes and in blocks of code."""

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def spans(path: Path) -> Iterator[str]:
    """Yield the text in backquotes outside blocks."""
    yield from re.findall(r"`([^`\n]+)`", _BLOCK.sub("", path.read_text()))


def code_lines(path: Path) -> Iterator[str]:
    """Yield the lines of blocks, without the prompt of a shell."""
    for block in _BLOCK.findall(path.read_text()):
        yield from (line.removeprefix("$ ") for line in block.splitlines())


def python_blocks(path: Path) -> list[str]:
    """Return the blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
