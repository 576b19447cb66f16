"""Decides if a response in words contains the expected answer, with one rule per way of writing
answers. Pure.

gsm8k: the number after the last `####`, or else the last number. math: the expression in the last
\\boxed{}, equal as mathematics. exact: the last line that is not empty, without leading or trailing
spaces. regex: the pattern matches somewhere. Comparing expressions and searching patterns can take
forever, so `is_right` runs in a process that can be killed (text_process.py).
"""

import ast
import re
from decimal import Decimal, InvalidOperation

from async_rl.core.programs import PYTHON
from async_rl.core.types import AnswerTest, CodeProblem
from async_rl.rewards.extraction import MAX_PARSED_CHARS, Extraction, extract_code

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MAX_NUMBER_CHARS = 1_000
"""A longer number does not count as an answer; a million digits are beyond Decimal's range."""
_MARK = "####"
_BOX = "\\boxed{"
_BRACE = re.compile(r"\\boxed\{|[{}]")


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
    try:
        return Decimal(number.replace("$", "").replace(",", ""))
    except InvalidOperation:
        return None


def _is_equal_expression(expected: str, response: str) -> bool:
    given = boxed(response)
    if given is None:
        return False
    content = boxed(expected)
    if content is None:
        content = expected
    # Data sets write 50 or 50\\% for the same answer.
    plain = [text.replace("\\%", "").replace("%", "") for text in (content, given)]
    return _is_same(content, given) or (plain != [content, given] and _is_same(*plain))


def _is_same(expected: str, given: str) -> bool:
    from math_verify import parse, verify

    # The library's own time limits need signals, and the process has its limit already.
    wanted, answer = (parse(f"{_BOX}{text}}}", parsing_timeout=None) for text in (expected, given))
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
    if problem.language != PYTHON or len(code) > MAX_PARSED_CHARS:
        return code.strip()
    # Without comments and layout; a program that does not parse votes for its text.
    try:
        return ast.unparse(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code.strip()
