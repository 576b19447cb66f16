"""The learner and the generators of a service, as its front calls them."""

import collections
import contextlib
import logging
from typing import Any

from async_rl.core.errors import Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.service import Execute, Executed, LoadSlot, Sample, Sampled
from async_rl.protocol.supervisor import DRAINING, Member
from async_rl.runtime.context import ProcessContext
from async_rl.weights.membership import Life, life_of

_LONGEST_S = 3600.0
"""A request takes minutes at most; a process that hangs is ended by the supervisor before this."""
_log = logging.getLogger(__name__)


class Processes:
    """Calls them across their restarts."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._directory = context.directory
        self._learner: Member | None = None
        """The life that has executed the requests so far."""
        self._busy = collections.Counter[Life]()
        self._broken: set[Life] = set()

    async def execute(self, request: Execute) -> Executed:
        """Let the learner execute a request. Unavailable if it left: its successor, which executes
        the next request, has no run.
        """
        while self._learner is None:
            self._learner = self._directory.find("learner")
            if self._learner is None:
                await self._wait_for("the learner")
        try:
            executed: Executed = await self._call(self._learner, request)
        except Unavailable:
            self._learner = None
            raise
        return executed

    async def _call(self, member: Member, request: Message) -> Any:
        return await self._context.incarnation_of(member).call(request, timeout_s=_LONGEST_S)

    async def _wait_for(self, process: str) -> None:
        with self._context.activity.waiting(process):
            await self._directory.changed(self._directory.revision)

    async def sample(self, request: Sample) -> Sampled:
        """Let the least busy generator draw the sequences, another one if it leaves."""
        while True:
            usable = {
                life_of(member): member
                for member in self._directory.of_role("generator")
                if member.state != DRAINING and life_of(member) not in self._broken
            }
            if not usable:
                await self._wait_for("a generator")
                continue
            life = min(usable, key=self._busy.__getitem__)
            self._busy[life] += 1
            try:
                sampled: Sampled = await self._call(usable[life], request)
                return sampled
            except Unavailable as error:
                _log.warning("sample %s moves: %s", request.request_id, error)
                self._broken.add(life)
            finally:
                self._busy[life] -= 1

    async def load(self, request: LoadSlot) -> None:
        """Let the policy continue with these weights on every generator; others load what a sample
        names. Raises DataError if a generator refuses them.
        """
        for member in self._directory.of_role("generator"):
            # One that leaves has a successor, which is one of the others.
            with contextlib.suppress(Unavailable):
                await self._call(member, request)
