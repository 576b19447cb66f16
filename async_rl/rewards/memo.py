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

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from async_rl.core.codec import encode
from async_rl.core.frozen import frozen
from async_rl.core.types import CodeProblem, Verdict

_LASTING = frozenset(
    {Verdict.PASS, Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR, Verdict.COMPILE_ERROR}
)


@frozen
class Judged:
    """The result of a program: one verdict per test that ran, and the message of the first of them
    that failed.
    """

    verdicts: tuple[Verdict, ...]
    failure: str = ""


class Verifier(Protocol):
    """Judges a program."""

    def verify(self, problem: CodeProblem, code: str) -> Coroutine[Any, Any, Judged]:
        """The result of `code`. Raises InfrastructureError if it could not be judged."""


class VerdictMemo:
    """A Verifier that sends only unknown programs to another Verifier.

    size: number of programs to remember, the ones used last.
    """

    def __init__(self, verifier: Verifier, *, size: int) -> None:
        self._verifier = verifier
        self._size = size
        self._judgements: OrderedDict[bytes, asyncio.Task[Judged]] = OrderedDict()
        self.num_asked = 0
        self.num_remembered = 0

    @property
    def share(self) -> float:
        """Share of the programs so far whose verdict was known."""
        return self.num_remembered / max(self.num_asked, 1)

    async def verify(self, problem: CodeProblem, code: str) -> Judged:
        """The result, remembered or new. Raises InfrastructureError as the verifier does."""
        # A digest, because programs and tests of some KB each would fill the memory.
        key = hashlib.blake2b(encode([problem, code]), digest_size=16).digest()
        self.num_asked += 1
        task = self._judgements.pop(key, None)
        self.num_remembered += task is not None
        if task is None:
            task = asyncio.create_task(self._verifier.verify(problem, code), name="judge a program")
            task.add_done_callback(partial(self._forget_unless_lasting, key))
        # At the end, so that the first is the least recently used program, which is forgotten.
        self._judgements[key] = task
        if len(self._judgements) > self._size:
            self._judgements.popitem(last=False)
        # The end of one sample must not end a judgement that others wait for; the verifier's
        # deadline bounds it.
        return await asyncio.shield(task)

    def _forget_unless_lasting(self, key: bytes, task: asyncio.Task[Judged]) -> None:
        # After a failure the next sample with this program must start a new judgement. This also
        # reads the exception if no sample is left to receive it.
        failed = task.cancelled() or task.exception() is not None
        if failed or not _LASTING.issuperset(task.result().verdicts):
            self._judgements.pop(key, None)

    async def close(self) -> None:
        """Cancel the judgements that are running."""
        running = [task for task in self._judgements.values() if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
