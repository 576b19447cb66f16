"""The owner of the child process that compares answers in words (`answer_child.py`)."""

from __future__ import annotations

import signal

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.verifier import answer_child
from async_rl.rewards.verifier.answer_child import AnswerQuery, AnswerResult
from async_rl.rewards.verifier.child_process import Respondent


class AnswerProcess:
    """Compares one response at a time in a child process."""

    def __init__(self) -> None:
        self._child = Respondent(answer_child.__name__, AnswerResult)

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout.

        Raises InfrastructureError if the rule failed, or if the child exited before the deadline.
        """
        query = AnswerQuery(test=test, response=response, deadline_s=deadline_s)
        result = await self._child.ask(query)
        if result == -signal.SIGALRM:
            return Verdict.TIMEOUT
        if isinstance(result, int):
            raise InfrastructureError(
                f"the process that compares answers ended with exit code {result}"
            )
        if result.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {result.error}"
            )
        return Verdict.PASS if result.is_right else Verdict.WRONG_ANSWER

    async def close(self) -> None:
        """End the child."""
        await self._child.close()
