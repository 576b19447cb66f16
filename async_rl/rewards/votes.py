"""The vote of a response when the samples of a prompt decide by majority. Pure.

Answers in words: the number (gsm8k), the content of the last box without spaces (math), the last
line (exact, regex). Programs: the text without comments, layout and quoting style, so two programs
agree only if they are written alike; a program that is too long to parse, or not in Python, keeps
its text.
"""

from __future__ import annotations

import ast

from async_rl.core.languages import PYTHON
from async_rl.core.types import AnswerTest, CodeProblem
from async_rl.rewards.answers import answer_of
from async_rl.rewards.extraction import MAX_PARSED_CHARS, Extraction, extract_code


def vote_of(problem: CodeProblem, response: str, extraction: Extraction) -> str | None:
    """The answer in a comparable form; None if the response has no answer."""
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
    try:
        return ast.unparse(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code.strip()
