"""The learner and the generators of a service, as its front calls them."""

import collections
import logging
from typing import Any

from async_rl.core.errors import DataError, DeadlineExceeded, Unavailable
from async_rl.protocol.base import Message
from async_rl.protocol.membership import DRAINING, Member
from async_rl.protocol.service import Execute, Executed, LoadSlot, Sample, Sampled
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
        self._learners: dict[str, Member] = {}
        """The life of the learner that has each training run."""
        self._busy = collections.Counter[Life]()
        self._broken: set[Life] = set()

    async def find_learner(self, run_id: str) -> None:
        """Wait for a learner, which then executes the requests of a training run."""
        while (member := self._directory.find("learner")) is None:
            with self._context.activity.waiting("the learner"):
                await self._directory.changed(self._directory.revision)
        self._learners[run_id] = member

    async def execute(self, request: Execute) -> Executed:
        """Let the learner of the run execute a request; Unavailable if it left."""
        executed: Executed = await self._call(self._learners[request.run_id], request)
        return executed

    async def _call(self, member: Member, request: Message) -> Any:
        return await self._context.incarnation_of(member).call(request, timeout_s=_LONGEST_S)

    async def sample(self, request: Sample) -> Sampled:
        """Let the least busy generator draw the sequences, another one if it leaves."""
        while True:
            revision = self._directory.revision
            usable = [
                member
                for member in self._directory.of_role("generator")
                if member.state != DRAINING and life_of(member) not in self._broken
            ]
            if not usable:
                with self._context.activity.waiting("a generator"):
                    await self._directory.changed(revision)
                continue
            member = min(usable, key=lambda member: self._busy[life_of(member)])
            life = life_of(member)
            self._busy[life] += 1
            try:
                sampled: Sampled = await self._call(member, request)
            except DeadlineExceeded:
                raise
            except Unavailable as error:
                _log.warning("sample %s moves: %s", request.request_id, error)
                self._broken.add(life)
            else:
                return sampled
            finally:
                self._busy[life] -= 1

    async def load(self, request: LoadSlot) -> None:
        """Let the policy continue with these weights on every generator; others load what a sample
        names. Raises DataError if a generator refuses them.
        """
        for member in self._directory.of_role("generator"):
            try:
                await self._call(member, request)
            except Unavailable as error:
                if self._directory.find(member.name) == member:
                    raise DataError(f"{member.name}: {error}") from error
