"""The form of a response, its program, and its answer in words. Pure.

Programs: the whole text, or its last fenced block in the language of the problem. auto: the last
fenced block if the response has a complete fence, else the whole text. The text is not judged here:
a text that is not Python is returned unchanged and fails to compile in the jail. A block counts if
its fence names the language or none; a Python block must also parse.

Words, with one rule per way of writing answers. gsm8k: the number after the last `####`, or else
the last number. math: the expression in the last \\boxed{}, equal as mathematics. exact: the last
line that is not empty, without leading or trailing spaces. regex: the pattern matches somewhere.
Comparing expressions and searching patterns can take forever, so `is_right` runs in a process that
can be killed (text_process.py).

Invariants: finding the fences takes linear time; at most MAX_PARSED_CHARS of a response are parsed,
starting with its last block, so an event loop may extract programs.
"""

import ast
import re
import warnings
from contextlib import suppress
from decimal import Decimal
from typing import NamedTuple

from async_rl.config.rewards import Extraction
from async_rl.core.programs import PYTHON, Language, names_of
from async_rl.core.types import AnswerTest, CodeProblem

MIN_BLOCK_CHARS = 20
"""A shorter fenced block is a remark, not a solution."""
MAX_PARSED_CHARS = 10_000
"""Most programs take the parser 10 ms then. It takes quadratic time for some texts (one f-string of
many fields): 25 ms for 10,000 characters, 0.2 s for 50,000.
"""
_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_FORM = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FENCE = "```"
_AFTER_WORD = re.compile(r"[^\w+]")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MAX_NUMBER_CHARS = 1_000
"""A longer number does not count as an answer; a million digits are beyond Decimal's range, and
every shorter number that `_NUMBER` matches is within it.
"""
_MARK = "####"
_BOX = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")


class Block(NamedTuple):
    """A complete fenced block. end: of the block in the response, in characters."""

    end: int
    code: str


def is_well_formed(response: str) -> bool:
    """Return whether it is one <think> part, then one <answer> part, and nothing else."""
    # The counts first: with many tags the expression takes quadratic time.
    return all(response.count(tag) == 1 for tag in _TAGS) and _FORM.fullmatch(response) is not None


def extract_code(response: str, mode: Extraction, language: Language = PYTHON) -> str | None:
    """The program in `response`; None if a block is needed and none is usable."""
    if mode == "whole":
        return response
    blocks = complete_blocks(response, language)
    if blocks:
        return blocks[-1].code
    return response if mode == "auto" and _FENCE not in response else None


def complete_blocks(response: str, language: Language = PYTHON) -> list[Block]:
    """The usable fenced blocks, in order: the last ones that are short enough to be parsed here, or
    else the last one.
    """
    fenced = _fenced_blocks(response, language)
    if language != PYTHON:
        return fenced
    blocks: list[Block] = []
    num_left = MAX_PARSED_CHARS
    # The last block first: it is the program, and a long response must not use up its share.
    for block in reversed(fenced):
        num_left -= len(block.code)
        if num_left < 0:
            return blocks[::-1] or [block]
        # Python warns of odd escapes in the program, which says nothing about this process.
        with suppress(*_UNPARSABLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(block.code)
            blocks.append(block)
    return blocks[::-1]


def _fenced_blocks(response: str, language: Language) -> list[Block]:
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
            named = text[len(_FENCE) :].lstrip(" \t")
            word = _AFTER_WORD.split(named, maxsplit=1)[0].lower()
        elif opened >= 0 and text == _FENCE:
            code = response[opened:start]
            if word in words and len(code.strip()) >= MIN_BLOCK_CHARS:
                blocks.append(Block(end, code))
            opened = -1
        start = end + 1
    return blocks


def is_right(test: AnswerTest, response: str) -> bool:
    """Return whether the response contains the answer of `test`, by its rule."""
    match test.rule:
        case "gsm8k":
            number = _number(response)
            return number is not None and number == _number(test.expected)
        case "exact":
            return _last_line(response) == test.expected.strip()
        case "regex":
            return re.search(test.expected, response) is not None
        case "math":
            return _is_equal_expression(test.expected, response)


def answer_of(test: AnswerTest, response: str) -> str | None:
    """The answer in the response, in a form in which equal answers are mostly equal texts.

    None if the response has no answer.
    """
    match test.rule:
        case "gsm8k":
            number = _number(response)
            return None if number is None else format(number.normalize(), "f")
        case "math":
            content = boxed(response)
            return None if content is None else "".join(content.split())
    # Two matches of one pattern may differ, so the vote of regex is the line and not the match.
    return _last_line(response)


def _last_line(text: str) -> str | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _number(text: str) -> Decimal | None:
    _, mark, after = text.rpartition(_MARK)
    # Without a mark rpartition returns the whole text as its last part.
    numbers = _NUMBER.findall(after)
    if not numbers:
        return None
    number = numbers[0] if mark else numbers[-1]
    if len(number) > _MAX_NUMBER_CHARS:
        return None
    return Decimal(number.replace("$", "").replace(",", ""))


def _is_equal_expression(expected: str, response: str) -> bool:
    given = boxed(response)
    if given is None:
        return False
    from math_verify import parse, verify

    content = boxed(expected)
    texts = (expected if content is None else content, given)
    # Data sets write 50 or 50\\% for the same answer.
    plain = [text.replace("\\%", "").replace("%", "") for text in texts]
    # The library's own time limits need signals, and the process has its limit already.
    wanted, answer = (parse(f"{_BOX}{text}}}", parsing_timeout=None) for text in plain)
    return bool(verify(wanted, answer, timeout_seconds=None))


def boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{}, with balanced braces; None if there is none."""
    last = -1
    content = None
    opened: list[tuple[int, bool]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] == _BOX))
        elif opened:
            start, is_box = opened.pop()
            # An inner box starts later than the box around it, but closes first.
            if is_box and start > last:
                last = start
                content = text[start : brace.start()]
    return content


def vote_of(problem: CodeProblem, response: str, extraction: Extraction) -> str | None:
    """The vote of a response when the samples of a prompt decide by majority; None if it has none.

    Answers in words: the number (gsm8k), the content of the last box without spaces (math), the
    last line (exact, regex). Programs: the text without comments, layout and quoting style, so two
    programs agree only if they are written alike; a program that is too long to parse, or not in
    Python, keeps its text.
    """
    for test in problem.tests:
        if isinstance(test, AnswerTest):
            return answer_of(test, response)
    if not problem.tests:
        return response.strip() or None
    code = extract_code(response, extraction, problem.language)
    if code is None or not code.strip():
        return None
    if problem.language == PYTHON and len(code) <= MAX_PARSED_CHARS:
        # Without comments and layout; a program that does not parse votes for its text.
        with suppress(*_UNPARSABLE):
            return ast.unparse(ast.parse(code))
    return code.strip()
