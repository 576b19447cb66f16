"""The child process that compares responses in words with expected answers.

Takes one line per comparison, writes one line per result. A comparison that exceeds its deadline
ends the process, because a regular expression or a formula can take forever and cannot be
interrupted in any other way. The alarm is the process's own, so it also ends a process without an
owner.
"""

from __future__ import annotations

import importlib
import os
import re
import signal

import msgspec

from async_rl.core.frozen import Value
from async_rl.core.types import AnswerTest
from async_rl.rewards.answers import is_right
from async_rl.rewards.verifier.child_process import ParentPipes


class AnswerQuery(Value):
    """One comparison."""

    test: AnswerTest
    response: str
    deadline_s: float


class AnswerResult(Value):
    """The result of a comparison; error: the exception that the rule raised."""

    is_right: bool = False
    error: str = ""


def main() -> None:
    """Answer line by line until the input ends."""
    parent = ParentPipes()
    with os.fdopen(parent.incoming, "rb") as lines:
        for line in lines:
            query = msgspec.json.decode(line, type=AnswerQuery)
            if query.test.rule == "math":
                # The first import takes seconds, which must not count against the response.
                importlib.import_module("math_verify")
            signal.setitimer(signal.ITIMER_REAL, query.deadline_s)
            result = _compare(query)
            signal.setitimer(signal.ITIMER_REAL, 0)
            parent.send(result)


def _compare(query: AnswerQuery) -> AnswerResult:
    try:
        return AnswerResult(is_right=is_right(query.test, query.response))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        re.error,
    ) as error:
        return AnswerResult(error=f"{type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main()
