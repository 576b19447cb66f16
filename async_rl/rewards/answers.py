"""Whether a response in words gives the answer that is wanted: one rule for each way of writing
answers. Pure.

gsm8k: the number after the last `####`, or else the last number; math: the expression in the last
\\boxed{}, equal as mathematics;
exact: the last line that is not empty, spaces at its ends aside; regex: the pattern matches
somewhere. `is_right` is called by answer_child.py, in a process that may be ended: comparing
expressions and searching patterns can take for ever.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from async_rl.core.types import AnswerTest

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_MARK = "####"


def is_right(test: AnswerTest, response: str) -> bool:
    """Whether the response answers as `test` wants."""
    if test.rule == "gsm8k":
        got, wanted = _number(response), _number(test.expected)
        return got is not None and got == wanted
    if test.rule == "exact":
        lines = [line.strip() for line in response.splitlines() if line.strip()]
        return bool(lines) and lines[-1] == test.expected.strip()
    if test.rule == "regex":
        return re.search(test.expected, response) is not None
    return _is_equal_expression(test.expected, response)


def answer_of(test: AnswerTest, response: str) -> str | None:
    """The answer in the response as the rule reads it, in a form in which equal answers are mostly
    equal texts; None if there is none.
    """
    if test.rule == "gsm8k":
        number = _number(response)
        return None if number is None else format(number.normalize(), "f")
    if test.rule == "math":
        content = boxed(response)
        return None if content is None else "".join(content.split())
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _number(text: str) -> Decimal | None:
    _, mark, after = text.rpartition(_MARK)
    found = _NUMBER.findall(after)
    if not found:
        return None
    try:
        return Decimal((found[0] if mark else found[-1]).replace("$", "").replace(",", ""))
    except InvalidOperation:
        return None


def _is_equal_expression(expected: str, response: str) -> bool:
    from math_verify import parse, verify

    got = boxed(response)
    if got is None:
        return False
    answer = boxed(expected)
    # No time limits of the library's own: they need signals, and the process has its limit.
    wanted, given = (
        parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        for text in (expected if answer is None else answer, got)
    )
    return bool(verify(wanted, given, timeout_seconds=None))


def boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{}, braces inside it balanced; None if there is none."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for place in range(start + len("\\boxed"), len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : place]
        start = text.rfind("\\boxed{", 0, start)
    return None
