"""The generators of a run as one engine, for a gateway.

takes: rows of tokens to continue, answers whose tool calls are to be read
waits for: a generator with weights
returns: the continuation, from another generator if the first one exits
woken by: the directory, new weights of a generator

Invariants
- A row that is sent to another generator consists of the same token ids.
- A row under which an engine died is sent to no other engine, because it may be the cause. A row
  whose generator was lost for another reason is sent again once.
"""

import asyncio
import collections
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from async_rl.core.errors import (
    DeadlineExceeded,
    EngineDead,
    InfrastructureError,
    Unavailable,
)
from async_rl.core.types import NO_VERSION, Sampling, Ticket
from async_rl.protocol.generator import (
    CallsRead,
    Complete,
    Completion,
    Continuation,
    EngineVersion,
    ReadCalls,
    WatchVersion,
)
from async_rl.protocol.supervisor import DRAINING, Member
from async_rl.runtime.context import ProcessContext
from async_rl.weights.membership import Life, life_of

_WATCH_S = 20.0
_log = logging.getLogger(__name__)


class RemoteEngines:
    """Calls of all generators."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._directory = context.directory
        # Long enough for a generator to start again.
        self._call_timeout_s = context.config.timeouts.longest_group_s(
            context.config.data.max_response_tokens
        )
        self._weights: dict[Life, EngineVersion] = {}
        self.chosen: dict[str, str] = {}
        self._loads = collections.Counter[str]()
        self._has_weights = asyncio.Event()

    @property
    def version(self) -> int:
        """The oldest version among the generators that have weights."""
        return min((weights.version for weights in self._weights.values()), default=NO_VERSION)

    @property
    def life(self) -> int:
        """The oldest life of the learner among those that made these weights."""
        return min((weights.life for weights in self._weights.values()), default=0)

    def forget(self, ticket: Ticket) -> None:
        """Free the choices of the sessions of an attempt that is closed."""
        attempt = f"{ticket.group_id}.{ticket.attempt}."
        self.chosen = {
            session: name
            for session, name in self.chosen.items()
            if not session.startswith(attempt)
        }

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], num_samples: int, sampling: Sampling
    ) -> AsyncGenerator[Completion, None]:
        """Yield the one continuation. request_id: starts with the id of the session and a slash."""
        session = request_id.partition("/")[0]
        request = Complete(
            request_id=f"{request_id}.{self._context.name}",
            token_ids=np.array(prompt_token_ids, np.int32),
            sampling=sampling,
        )
        # A collection of garbage visits each entry of a list, of hundreds of calls in flight.
        del prompt_token_ids
        continuation: Continuation = await self._call(session, request)
        yield continuation.completed

    async def read_calls(self, request: ReadCalls) -> CallsRead:
        """Let a generator read the tool calls of an answer; always the same one, as long as it
        lives, so that one of them has the parser.
        """
        read: CallsRead = await self._call("reader of tool calls", request)
        return read

    async def _call(self, session: str, request: Complete | ReadCalls) -> Any:
        lost: set[Life] = set()
        while True:
            member = await self._choose(session)
            life = self._context.incarnation_of(member)
            # Calls, not sessions: agents think for very different times between two calls.
            self._loads[member.name] += 1
            try:
                return await life.call(request, timeout_s=self._call_timeout_s)
            except Unavailable as error:
                # Only the tokens so far are needed to continue, and this process has them.
                _log.warning("session %s moves: %s", session, error)
                lost.add(life_of(member))
                # A crash of the process shows no cause, and a call may cause it.
                if len(lost) > 1:
                    raise EngineDead(f"two generators were lost under one call: {error}") from error
                self._weights.pop(life_of(member), None)
                self.chosen.pop(session, None)
            finally:
                self._loads[member.name] -= 1

    async def _choose(self, session: str) -> Member:
        """The generator that has the session's prefix in its cache, else the least busy one."""
        while True:
            revision = self._directory.revision
            usable = {
                member.name: member
                for member in self._directory.of_role("generator")
                if member.state != DRAINING and life_of(member) in self._weights
            }
            if usable:
                name = self.chosen.get(session, "")
                if name not in usable:
                    name = min(usable, key=lambda name: self._loads[name])
                    self.chosen[session] = name
                return usable[name]
            # Before the look at the directory: a version that comes now sets it again.
            self._has_weights.clear()
            with self._context.activity.waiting("a generator with weights"):
                # A change since the choice would be missed by the wait.
                if self._directory.revision == revision:
                    await self._directory.changed_or(self._has_weights)

    async def follow(self, on_version: Callable[[], None]) -> None:
        """Watch the version of every generator in the directory, until cancelled.

        on_version: called when the oldest version among them changes.
        """
        watched: dict[Life, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                revision = self._directory.revision
                members = {life_of(m): m for m in self._directory.of_role("generator")}
                left = watched.keys() - members.keys()
                for key in left:
                    watched.pop(key).cancel()
                    self._weights.pop(key, None)
                # Nobody else would say that the oldest weights have left.
                if left and self._weights:
                    on_version()
                for key in members.keys() - watched.keys():
                    watched[key] = group.create_task(
                        self._watch(members[key], on_version), name=f"version of {key[0]}"
                    )
                await self._directory.changed(revision)

    async def _watch(self, member: Member, on_version: Callable[[], None]) -> None:
        key = life_of(member)
        life = self._context.incarnation_of(member)
        known = EngineVersion(version=NO_VERSION, life=0)
        while True:
            request = WatchVersion(known=known, wait_s=_WATCH_S)
            try:
                timeout_s = _WATCH_S + self._context.config.timeouts.call_s
                reply: EngineVersion = await life.call(request, timeout_s=timeout_s)
            except DeadlineExceeded:
                continue
            except InfrastructureError:
                return  # it exited; its successor is watched as another life
            # A generator whose time ran out answers with the version that it had.
            if reply.version != NO_VERSION and reply != known:
                known = self._weights[key] = reply
                self._has_weights.set()
                on_version()
