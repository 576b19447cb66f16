"""Work on the text of responses that may hang or take long, in a child process that can be killed.

Comparing an answer in words may take forever, because regular expressions and formulas cannot be
interrupted. Parsing the program in a response holds the interpreter's lock, so a thread would not
help: a response with much fenced text is parsed in the child too. The child starts with the first
question that needs it, and takes one line per question and writes one line per result. A comparison
that exceeds its deadline stops the process. The alarm runs inside the process, so it also stops
a process whose owner has exited.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal

import msgspec

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import Value
from async_rl.core.languages import PYTHON, Language
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.answers import is_right
from async_rl.rewards.child_process import ChildProcess, ParentPipes
from async_rl.rewards.extraction import (
    Block,
    Extraction,
    complete_blocks,
    fenced_blocks,
    program_of,
)

_MAX_INLINE_CHARS = 5_000
"""Less fenced text than this parses in 10 ms at most, and most responses have less."""
_MODULE = "async_rl.rewards.text_process"


class Question(Value):
    """A response with the test to compare it with; without a test, its blocks are extracted."""

    response: str
    test: AnswerTest | None = None
    deadline_s: float = 0


class Reply(Value):
    """The result of a question. error: the exception that the rule of a test raised."""

    is_right: bool = False
    error: str = ""
    blocks: tuple[Block, ...] = ()


class TextProcess:
    """Finds programs in responses and compares answers, one question at a time."""

    def __init__(self) -> None:
        self._child: ChildProcess[Reply] | None = None
        self._turn = asyncio.Lock()

    async def code(
        self, response: str, mode: Extraction, language: Language = PYTHON
    ) -> str | None:
        """The program in `response`; None if a block is needed and none is usable."""
        blocks = [] if mode == "whole" else await self.blocks(response, language)
        return program_of(response, blocks, mode)

    async def blocks(self, response: str, language: Language = PYTHON) -> list[Block]:
        """The usable fenced blocks, in order. Raises InfrastructureError if the child exited."""
        fenced = fenced_blocks(response, language)
        # Only Python blocks are parsed, so blocks of other languages need no child.
        if language != PYTHON:
            return fenced
        if sum(len(block.code) for block in fenced) <= _MAX_INLINE_CHARS:
            return complete_blocks(response)
        reply = await self._ask(Question(response=response))
        if isinstance(reply, int):
            raise InfrastructureError(
                f"the process that extracts programs exited with code {reply}"
            )
        return list(reply.blocks)

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout.

        Raises InfrastructureError if the rule failed, or if the child exited before the deadline.
        """
        reply = await self._ask(Question(response=response, test=test, deadline_s=deadline_s))
        # The alarm of the child has its default action, which kills it; so this exit code is the
        # deadline.
        if reply == -signal.SIGALRM:
            return Verdict.TIMEOUT
        if isinstance(reply, int):
            raise InfrastructureError(f"the process that compares answers exited with code {reply}")
        if reply.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {reply.error}"
            )
        return Verdict.PASS if reply.is_right else Verdict.WRONG_ANSWER

    async def _ask(self, question: Question) -> Reply | int:
        """The reply, or the exit code of a child that exited without one.

        Questions take turns, so that the exit of the child belongs to one of them.
        """
        async with self._turn:
            child = self._child or await ChildProcess.start(_MODULE, Reply)
            self._child = child
            try:
                child.send(question)
                reply = await child.receive()
            except BaseException:
                # Cancelled: the next question would read the reply to this one.
                await self.close()
                raise
            if reply is not None:
                return reply
            self._child = None
            return await child.exit_code()

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.exit_code()


def _reply_to(question: Question) -> Reply:
    if question.test is None:
        return Reply(blocks=tuple(complete_blocks(question.response)))
    if question.test.rule == "math":
        # The first import takes seconds, which must not count against the response.
        importlib.import_module("math_verify")
    # The default action of the alarm kills the process even inside one long call in C, which a
    # handler in Python could not interrupt.
    signal.setitimer(signal.ITIMER_REAL, question.deadline_s)
    try:
        return Reply(is_right=is_right(question.test, question.response))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        re.error,
    ) as error:
        return Reply(error=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        # Otherwise the alarm of this question would kill the process during the next one.
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """The child: reply line by line until its input is closed."""
    parent = ParentPipes()
    with os.fdopen(parent.incoming, "rb") as lines:
        for line in lines:
            parent.send(_reply_to(msgspec.json.decode(line, type=Question)))


if __name__ == "__main__":
    main()
