"""Verdicts of programs that were judged before: a policy writes the same program many times, and
the jail runs it once.

Invariants
- The key is the whole problem and the whole program, so a program only gets the verdict of an equal
  program.
- Only verdicts that the program alone decides are kept; time, memory and output limits can depend
  on the machine and are judged again.
- Samples whose program is being judged share that judgement. Its failure reaches all of them and is
  not kept.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from async_rl.core.codec import encode
from async_rl.core.types import CodeProblem, Verdict
from async_rl.rewards.verifier.protocol import TestResult

T = TypeVar("T")
_LASTING = frozenset(
    {Verdict.PASS, Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR, Verdict.COMPILE_ERROR}
)

MAX_FAILURE_CHARS = 400
"""Characters of a message that a score keeps."""
_PASSED = TestResult(verdict=Verdict.PASS)


class Verifier(Protocol):
    """Judges a program."""

    def verify(self, problem: CodeProblem, code: str) -> Coroutine[Any, Any, list[TestResult]]:
        """The results of the tests that ran. Raises InfrastructureError."""


class Memo(Generic[T]):
    """Results by key. Work on a key that is running is shared; its failure reaches everyone who
    waits for it and is not kept.

    size: number of results to remember, the ones used last; lasts: a result is worth keeping.
    """

    def __init__(self, *, size: int, lasts: Callable[[T], bool]) -> None:
        self._size = size
        self._lasts = lasts
        self._tasks: OrderedDict[bytes, asyncio.Task[T]] = OrderedDict()
        self.num_asked = 0
        self.num_remembered = 0

    async def get(self, key: bytes, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result, remembered or new. Raises as the work does."""
        self.num_asked += 1
        task = self._tasks.pop(key, None)
        self.num_remembered += task is not None
        if task is None:
            task = asyncio.create_task(work(), name="make a remembered result")
            task.add_done_callback(partial(self._forget_unless_lasting, key))
        # At the end, so that the first is the least recently used result, which is forgotten.
        self._tasks[key] = task
        if len(self._tasks) > self._size:
            self._tasks.popitem(last=False)
        # One who waits and is cancelled must not end work that others wait for.
        return await asyncio.shield(task)

    def _forget_unless_lasting(self, key: bytes, task: asyncio.Task[T]) -> None:
        # After a failure the next request must start new work. This also reads the exception if
        # no caller is left to receive it.
        failed = task.cancelled() or task.exception() is not None
        if failed or not self._lasts(task.result()):
            self._tasks.pop(key, None)

    async def close(self) -> None:
        """Cancel the work that is running."""
        running = [task for task in self._tasks.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class VerdictMemo(Memo[list[TestResult]]):
    """A Verifier that sends only unknown programs to another Verifier."""

    def __init__(self, verifier: Verifier, *, size: int) -> None:
        super().__init__(
            size=size, lasts=lambda results: all(each.verdict in _LASTING for each in results)
        )
        self._verifier = verifier

    @property
    def share(self) -> float:
        """Share of the programs so far whose verdict was known."""
        return self.num_remembered / max(self.num_asked, 1)

    async def verify(self, problem: CodeProblem, code: str) -> list[TestResult]:
        """The results, remembered or new. Raises InfrastructureError as the verifier does."""
        # A digest, because programs and tests of some KB each would fill the memory.
        key = hashlib.blake2b(encode([problem, code]), digest_size=16).digest()

        async def judge() -> list[TestResult]:
            return [_kept(result) for result in await self._verifier.verify(problem, code)]

        return await self.get(key, judge)


def _kept(result: TestResult) -> TestResult:
    """What a score reads of a result: one shared value for all tests that passed."""
    if result.verdict is Verdict.PASS and not result.message:
        return _PASSED
    return TestResult(verdict=result.verdict, message=result.message[:MAX_FAILURE_CHARS])
