"""Comparison of answers in words, in a child process that can be killed.

A comparison may take forever, because regular expressions and formulas cannot be interrupted. The
child starts with the first question, and takes one line per question and writes one line per
result. A comparison that exceeds its deadline stops the process. The alarm runs inside the process,
so it also stops a process whose owner has exited.
"""

import asyncio
import importlib
import re
import signal

from async_rl.core.errors import InfrastructureError
from async_rl.core.frozen import Value
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.child_process import ChildEnded, ChildProcess, ParentPipes
from async_rl.rewards.responses import is_right


class Question(Value):
    """A response with the test to compare it with."""

    response: str
    test: AnswerTest
    deadline_s: float


class Reply(Value):
    """The result of a question. error: the exception that the rule of a test raised."""

    verdict: Verdict = Verdict.WRONG_ANSWER
    error: str = ""


class TextProcess:
    """Compares answers, one at a time."""

    def __init__(self) -> None:
        self._child: ChildProcess[Reply] | None = None
        self._turn = asyncio.Lock()

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout.

        Raises InfrastructureError if the rule failed, or if the child exited before the deadline.
        """
        # In turns, so that the exit of the child belongs to one question.
        async with self._turn:
            if self._child is None:
                self._child = await ChildProcess.start(__name__, Reply)
            question = Question(response=response, test=test, deadline_s=deadline_s)
            try:
                reply = await self._child.ask(question)
            except ChildEnded as failure:
                await self.close()
                # The alarm of the child has its default action, which kills it; so this exit code
                # is the deadline.
                if failure.code == -signal.SIGALRM:
                    return Verdict.TIMEOUT
                raise InfrastructureError(
                    f"the process that compares answers exited with code {failure.code}"
                ) from failure
            except BaseException:
                # Cancelled, usually: the next question must not wait for this one's reply.
                await self.close()
                raise
        if reply.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {reply.error}"
            )
        return reply.verdict

    async def close(self) -> None:
        """End the child."""
        if self._child is not None:
            await self._child.kill()
            self._child = None


def _reply_to(question: Question) -> Reply:
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
