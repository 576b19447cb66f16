"""The program in a response: the whole text, or its last fenced Python block. Pure.

auto: the last fenced block, if the response has a complete fence, else the whole text.  The text is
not judged here: what does not parse comes back as it is and fails to compile in the jail.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Literal

MIN_BLOCK_CHARS = 20
"""A shorter fenced block is a remark, not a solution."""
_MAX_PARSED_CHARS = 100_000
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset({"", "python", "python3", "py"})


def extract_code(response: str, mode: Literal["auto", "fenced", "whole"]) -> str | None:
    """The program in `response`; None if mode is "fenced" and there is no usable block."""
    if mode == "whole":
        return response
    block = _last_block(response)
    if block is None and mode == "auto" and "```" not in response:
        return response
    return block


def complete_blocks(response: str) -> list[tuple[int, str]]:
    """The usable fenced blocks in order: where each ends, in characters, and its program."""
    found = [
        (match.end(), match[2])
        for match in _FENCE.finditer(response)
        if match[1].lower() in _PYTHON
    ]
    return [
        (end, body) for end, body in found if len(body.strip()) >= MIN_BLOCK_CHARS and _parses(body)
    ]


def _last_block(response: str) -> str | None:
    blocks = complete_blocks(response)
    return blocks[-1][1] if blocks else None


def _parses(code: str) -> bool:
    if len(code) > _MAX_PARSED_CHARS:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
