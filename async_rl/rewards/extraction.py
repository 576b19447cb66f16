"""The program in a response: the whole text, or its last fenced Python block. Pure.

auto: the last fenced block if the response has a complete fence, else the whole text. The text is
not judged here: a text that is not Python is returned unchanged and fails to compile in the jail.
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
    """The program in `response`; None if a block is needed and none is usable."""
    if mode == "whole":
        return response
    blocks = complete_blocks(response)
    if blocks:
        return blocks[-1][1]
    return response if mode == "auto" and "```" not in response else None


def complete_blocks(response: str) -> list[tuple[int, str]]:
    """The usable fenced blocks in order: the end of each, in characters, and its program."""
    blocks = []
    for match in _FENCE.finditer(response):
        language, body = match[1].lower(), match[2]
        if language in _PYTHON and len(body.strip()) >= MIN_BLOCK_CHARS and _parses(body):
            blocks.append((match.end(), body))
    return blocks


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
