"""The owner of the child process that compares answers in words (`answer_child.py`)."""

from __future__ import annotations

import asyncio
import signal

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, Verdict
from async_rl.rewards.verifier import answer_child
from async_rl.rewards.verifier.answer_child import AnswerQuery, AnswerResult
from async_rl.rewards.verifier.child_process import ChildProcess


class AnswerProcess:
    """One child, started for the first comparison and again after it ended.

    Comparisons take turns, so that the end of the child belongs to one of them.
    """

    def __init__(self) -> None:
        self._child: ChildProcess[AnswerResult] | None = None
        self._turn = asyncio.Lock()

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout.

        Raises InfrastructureError if the rule failed, or if the child ended before the deadline.
        """
        query = AnswerQuery(test=test, response=response, deadline_s=deadline_s)
        async with self._turn:
            child = self._child or await ChildProcess.start(answer_child.__name__, AnswerResult)
            self._child = child
            try:
                child.send(query)
                result = await child.receive()
            except BaseException:
                # Cancelled: the next comparison would read the answer of this one.
                await self.close()
                raise
            if result is None:
                self._child = None
                code = await child.exit_code()
                if code == -signal.SIGALRM:
                    return Verdict.TIMEOUT
                raise InfrastructureError(
                    f"the process that compares answers ended with exit code {code}"
                )
        if result.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {result.error}"
            )
        return Verdict.PASS if result.is_right else Verdict.WRONG_ANSWER

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.exit_code()
