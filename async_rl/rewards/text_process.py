"""Work on the text of responses that may hang or take long, in a child process that can be killed.

Comparing an answer in words may take forever, because regular expressions and formulas cannot be
interrupted. Parsing the program in a response holds the interpreter's lock, so a thread would not
help: a response with much fenced text is parsed in the child too. The child starts with the first
question that needs it, and takes one line per question and writes one line per result. A comparison
that exceeds its deadline stops the process. The alarm runs inside the process, so it also stops
a process whose owner has exited.
"""

import asyncio
import importlib
import re
import signal

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import Value
from async_rl.core.programs import PYTHON, Language
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.child_process import ChildEnded, ChildProcess, ParentPipes
from async_rl.rewards.responses import (
    Block,
    Extraction,
    complete_blocks,
    fenced_blocks,
    is_right,
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

    verdict: Verdict = Verdict.WRONG_ANSWER
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
        return list((await self._ask(Question(response=response))).blocks)

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout.

        Raises InfrastructureError if the rule failed, or if the child exited before the deadline.
        """
        reply = await self._ask(Question(response=response, test=test, deadline_s=deadline_s))
        if reply.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {reply.error}"
            )
        return reply.verdict

    async def _ask(self, question: Question) -> Reply:
        # In turns, so that the exit of the child belongs to one question.
        async with self._turn:
            if self._child is None:
                self._child = await ChildProcess.start(_MODULE, Reply)
            try:
                return await self._child.ask(question)
            except ChildEnded as failure:
                await self.close()
                # The alarm of the child has its default action, which kills it; so this exit code
                # is the deadline.
                if failure.code == -signal.SIGALRM:
                    return Reply(verdict=Verdict.TIMEOUT)
                raise InfrastructureError(
                    f"the process that reads responses exited with code {failure.code}"
                ) from failure
            except BaseException:
                # Cancelled, usually: the next question must not wait for this one's reply.
                await self.close()
                raise

    async def close(self) -> None:
        """End the child."""
        if self._child is not None:
            await self._child.kill()
            self._child = None


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
        found = is_right(question.test, question.response)
        return Reply(verdict=Verdict.PASS if found else Verdict.WRONG_ANSWER)
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
    while True:
        number, question = parent.receive(Question)
        parent.send(number, _reply_to(question))


if __name__ == "__main__":
    main()
