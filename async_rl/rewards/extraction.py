"""The program in a response: the whole text, or its last fenced block in the language of the
problem. Pure.

auto: the last fenced block if the response has a complete fence, else the whole text. The text is
not judged here: a text that is not Python is returned unchanged and fails to compile in the jail.
A block counts if its fence names the language or none; a Python block must also parse.
Invariants: finding the fences takes linear time; at most MAX_PARSED_CHARS of a response are parsed,
starting with its last block.
"""

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

from async_rl.core.programs import PYTHON, Language, names_of

MIN_BLOCK_CHARS = 20
"""A shorter fenced block is a remark, not a solution."""
MAX_PARSED_CHARS = 50_000
"""The parser takes quadratic time for some texts (one f-string of many fields): 0.2 s for 50,000
characters, 0.8 s for 100,000.
"""
Extraction = Literal["auto", "fenced", "whole"]
_FENCE = "```"
_WORD = re.compile(r"[ \t]*[\w+]*")


class Block(NamedTuple):
    """A complete fenced block. end: of the block in the response, in characters."""

    end: int
    code: str


def extract_code(response: str, mode: Extraction, language: Language = PYTHON) -> str | None:
    """The program in `response`; None if a block is needed and none is usable."""
    blocks = [] if mode == "whole" else complete_blocks(response, language)
    return program_of(response, blocks, mode)


def program_of(response: str, blocks: Sequence[Block], mode: Extraction) -> str | None:
    """As `extract_code`, with the complete blocks of the response."""
    if mode == "whole":
        return response
    if blocks:
        return blocks[-1].code
    return response if mode == "auto" and _FENCE not in response else None


def complete_blocks(response: str, language: Language = PYTHON) -> list[Block]:
    """The usable fenced blocks, in order."""
    fenced = fenced_blocks(response, language)
    if language != PYTHON:
        return fenced
    blocks = []
    num_left = MAX_PARSED_CHARS
    # The last block first: it is the program, and a long response must not use up its share.
    for block in reversed(fenced):
        num_left -= len(block.code)
        if num_left < 0:
            break
        if _parses(block.code):
            blocks.append(block)
    return blocks[::-1]


def fenced_blocks(response: str, language: Language = PYTHON) -> list[Block]:
    """The fenced blocks that may be programs in the language, in order; nothing is parsed.

    A fence opens with any word after it and closes with nothing after it.
    """
    blocks = []
    # Line by line instead of one regular expression, which takes quadratic time for open fences.
    opened = -1  # first character of the open block, or -1
    word = ""
    words = names_of(language) | {""}
    start = 0
    for line in response.split("\n"):
        end = start + len(line)
        text = line.strip(" \t")
        # A fence that ends with the response opens nothing.
        if opened < 0 and text.startswith(_FENCE) and end < len(response):
            opened = end + 1
            word = _word(text[len(_FENCE) :])
        elif opened >= 0 and text == _FENCE:
            code = response[opened:start]
            if word in words and len(code.strip()) >= MIN_BLOCK_CHARS:
                blocks.append(Block(end, code))
            opened = -1
        start = end + 1
    return blocks


def _word(text: str) -> str:
    word = _WORD.match(text)
    return word[0].strip(" \t").lower() if word else ""


def _parses(code: str) -> bool:
    try:
        # Python warns of odd escapes in the program, which says nothing about this process.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
