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
from typing import Protocol

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

    async def verify(self, problem: CodeProblem, code: str) -> Judged:
        """The result of `code`. Raises InfrastructureError if it could not be judged."""


class VerdictMemo:
    """A Verifier that sends only unknown programs to another Verifier.

    size: number of programs to remember, the ones used last.
    """

    def __init__(self, verifier: Verifier, *, size: int) -> None:
        self._verifier = verifier
        self._size = size
        self._known: OrderedDict[bytes, Judged] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Judged]] = {}
        self.num_asked = 0
        self.num_remembered = 0

    @property
    def share(self) -> float:
        """Share of the programs so far whose verdict was known."""
        return self.num_remembered / max(self.num_asked, 1)

    async def verify(self, problem: CodeProblem, code: str) -> Judged:
        """The result, remembered or new. Raises InfrastructureError as the verifier does."""
        self.num_asked += 1
        # A digest, because programs and tests of some KB each would fill the memory.
        key = hashlib.blake2b(encode([problem, code]), digest_size=16).digest()
        self.num_remembered += key in self._known or key in self._running
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._running:
            task = asyncio.create_task(self._judge(key, problem, code), name="judge a new program")
            # Read the exception even if no sample is left to receive it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._running[key] = task
        # The end of one sample must not end a judgement that others wait for; the verifier's
        # deadline bounds it.
        return await asyncio.shield(self._running[key])

    async def _judge(self, key: bytes, problem: CodeProblem, code: str) -> Judged:
        try:
            judged = await self._verifier.verify(problem, code)
        finally:
            # Also after a failure: the next sample with this program must start a new judgement.
            del self._running[key]
        if _LASTING.issuperset(judged.verdicts):
            self._known[key] = judged
            if len(self._known) > self._size:
                # The least recently used program: a hit moves its entry to the end.
                self._known.popitem(last=False)
        return judged

    async def close(self) -> None:
        """Cancel the judgements that are running."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
