"""The process in which responses in words are compared with answers, and its owner's side.

takes: one line per comparison; waits for: the next line; gives: one line per verdict; ends with its
owner, whose pipe closes. Invariant: a comparison ends after its deadline, because the process does:
its alarm needs nobody's help, so an orphan ends too. Used by judging.py.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from async_rl.core.errors import InfrastructureError
from async_rl.core.types import AnswerTest, Value, Verdict
from async_rl.rewards.answers import is_right

_LINE_LIMIT = 1 << 26


class Asked(Value):
    """One comparison."""

    test: AnswerTest
    response: str
    deadline_s: float


class Answered(Value):
    """Its result; error: what the rule raised."""

    is_right: bool = False
    error: str = ""


class AnswerChild:
    """One child, made when first needed and again after it ended; comparisons take turns."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    async def verdict(self, test: AnswerTest, response: str, deadline_s: float) -> Verdict:
        """Pass, wrong answer, or timeout. Raises InfrastructureError if the rule failed or the
        child ended by itself.
        """
        async with self._turn:
            process = self._process = self._process or await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(
                    msgspec.json.encode(Asked(test=test, response=response, deadline_s=deadline_s))
                    + b"\n"
                )
                line = await process.stdout.readline()
            except (
                BaseException
            ):  # cancelled in the middle: its answer would be taken for the next one's
                await self._end()
                raise
            if not line:
                code = await process.wait()
                self._process = None
                if code == -signal.SIGALRM:
                    return Verdict.TIMEOUT
                raise InfrastructureError(
                    f"the process that compares answers ended with exit code {code}"
                )
        answered = msgspec.json.decode(line, type=Answered)
        if answered.error:
            raise InfrastructureError(
                f"the answer could not be compared by rule {test.rule}: {answered.error}"
            )
        return Verdict.PASS if answered.is_right else Verdict.WRONG_ANSWER

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, limit=_LINE_LIMIT
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def close(self) -> None:
        """End the child."""
        await self._end()


def main() -> None:
    """The child: answers line by line until its input ends."""
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Asked)
        if asked.test.rule == "math":
            importlib.import_module(
                "math_verify"
            )  # seconds, once: no response's fault, so before the deadline begins
        signal.setitimer(signal.ITIMER_REAL, asked.deadline_s)
        try:
            answered = Answered(is_right=is_right(asked.test, asked.response))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            re.error,
        ) as error:
            answered = Answered(error=f"{type(error).__name__}: {str(error)[:200]}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answered) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
