"""A generator's groups: requests tickets from the buffer and returns each as a complete or failed
group.

takes: tickets, as many as the engine has room for
waits for: the first weights; then the buffer, when the engine has room
returns: complete groups to the buffer, or the ticket with the reason of the failure
woken by: a written group, new weights, the buffer's answer, `drain`
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
from msgspec.structs import replace

from async_rl.config.pools import evaluates_only
from async_rl.config.rewards import RemoteTerm
from async_rl.core.errors import (
    AgentError,
    AsyncRLError,
    EngineDead,
    InfrastructureError,
    NotTaken,
    ProtocolError,
    RewardError,
    raised_at,
    root_cause,
)
from async_rl.core.heads import pack_group
from async_rl.core.types import NO_VERSION, DropReason, Group, Purpose, Ticket, Trajectory
from async_rl.generation.engine import Generates
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.buffer import FailGroup, PutGroup, RequestWork, Work
from async_rl.protocol.generator import Drain
from async_rl.rollouts.rollout import Rollouts, num_written
from async_rl.runtime.context import ProcessContext

_PARK_S = 20.0
"""Longest time that the buffer keeps a request without an answer."""
_MOST_FAILED = 20
"""Groups in a row, of one generator. The pauses between them grow, so this takes about two minutes:
time for a disk or a service that the function uses to come back.
"""
_MOST_IN_A_ROW = 64
"""Failed groups. A weak policy makes many agents fail, a fault of the agent, of a rollout function
or of what they use all of them; then the prompts wait, instead of being dropped after their
attempts.
"""
_REASONS: Sequence[tuple[type[Exception], DropReason]] = (
    (RewardError, DropReason.REWARD_FAILED),
    (NotTaken, DropReason.NOT_TAKEN),
    (AgentError, DropReason.AGENT_FAILED),
    (InfrastructureError, DropReason.SCORING_FAILED),
    (Exception, DropReason.GENERATION_FAILED),
)
"""The reason by the cause of a failure: the first that fits."""


class Groups:
    """The groups that one generator makes.

    engine: returns the engine of a group that starts. limit: as asyncio.timeout, without the time
    when the engine may not be used. on_closed: called once the attempt has failed, or its group is
    with the buffer. draining: set to request no more tickets.
    """

    def __init__(
        self,
        context: ProcessContext,
        rollouts: Rollouts,
        *,
        engine: Callable[[], Generates],
        limit: Callable[[float], AbstractAsyncContextManager[object]],
        on_closed: Callable[[Ticket], None] = lambda ticket: None,
    ) -> None:
        self._context = context
        self._config = context.config
        self._rollouts = rollouts
        self._engine = engine
        self._limit = limit
        self._on_closed = on_closed
        self._limit_s = self._config.timeouts.longest_group_s(self._config.data.max_response_tokens)
        # Two attempts of a group may overlap, if the ticket of the first one has expired.
        self._in_flight: Counter[int] = Counter()
        self._num_writing: dict[int, int] = {}
        self._outage = ""
        self._num_failed = 0
        self._num_in_a_row = 0
        self._may_recover = any(
            isinstance(term, RemoteTerm) for term in self._config.reward.terms.values()
        )
        self._has_weights = asyncio.Event()
        self._has_room = asyncio.Event()
        self.draining = asyncio.Event()

    async def make(self) -> None:
        """Keep the engine full until `drain`, then finish the groups in flight.

        Cancelling it leaves them unfinished; the buffer issues their tickets again.
        """
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask(group), name="ask for work")
            await self.draining.wait()
            self._has_room.set()
            if self._has_weights.is_set():
                # The answer to the parked request may contain tickets; they are finished as well.
                # With a list the buffer answers it now, or it would get tickets for _PARK_S more.
                await self._request(credit=0, wait_s=0, held=[])
            else:
                asking.cancel()

    def weights_loaded(self) -> None:
        """Begin with the first weights."""
        self._has_weights.set()

    async def drain(self, _: Drain) -> Message:
        """Request no more tickets; `make` then finishes the groups in flight."""
        self.draining.set()
        return Ok()

    async def report_version(self) -> None:
        """Report the version of the engine to the buffer, also for the parked request."""
        await self._request(credit=0, wait_s=0, held=None)

    async def _ask(self, group: asyncio.TaskGroup) -> None:
        with self._context.activity.waiting("first weights from the learner"):
            await self._has_weights.wait()
        while not self.draining.is_set():
            room = self._room()
            # Without room the request would hold tickets back from other generators.
            if room < 1:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            for ticket in (await self.request_work(room)).tickets:
                group.create_task(self.roll_out(ticket), name=f"group {ticket.group_id}")
                self._in_flight[ticket.group_id] += 1
                self._num_writing[ticket.group_id] = num_written(
                    self._config, ticket.purpose, ticket.num_samples
                )

    def _room(self) -> int:
        """Return the groups that may start now.

        Only samples that the engine writes take room, not those that wait for scores.
        """
        full_group = num_written(self._config, Purpose.TRAIN, self._config.generation.num_drawn)
        num_groups = -(-sum(self._num_writing.values()) // full_group)
        return self._config.generation.max_concurrent_groups - num_groups

    async def request_work(self, credit: int) -> Work:
        """Wait for tickets of the buffer, at most `credit` of them."""
        activity = self._context.activity
        if evaluates_only(self._config, self._context.name):
            wait = activity.waiting("the next evaluation")
        else:
            outage = " ".join(self._outage.split())
            wait = activity.blocked(outage or "admission: the learner is behind")
        # The buffer issues tickets again that an earlier reply lost. Without this list a lost reply
        # would block their groups until the ticket expires.
        with wait:
            held = sorted(+self._in_flight)
            return await self._request(credit=credit, wait_s=_PARK_S, held=held)

    async def _request(self, *, credit: int, wait_s: float, held: list[int] | None) -> Work:
        request = RequestWork(
            generator=self._context.name,
            incarnation=self._context.incarnation,
            version=self._context.version,
            life=self._context.life,
            credit=credit,
            held=held,
            wait_s=wait_s,
        )
        work: Work = await self._context.call_buffer(request, wait_s=wait_s)
        return work

    def _on_written(self, ticket: Ticket) -> None:
        self._num_writing.pop(ticket.group_id, None)
        self._has_room.set()

    async def roll_out(self, ticket: Ticket) -> None:
        """Make and put one group. A failure returns its ticket and is counted.

        Raises RewardError once a function on this machine has failed for too many groups in a row.
        """
        written = functools.partial(self._on_written, ticket)
        try:
            async with self._limit(self._limit_s):
                drawn = await self._rollouts.group(ticket, self._engine(), written=written)
            group = _with_common_prompts(drawn)
        except TimeoutError:
            message = f"not done after {self._limit_s:g} s (timeouts.group_s)"
            await self._fail(ticket, DropReason.GENERATION_FAILED, message)
        except Exception as error:  # a bad rollout is data; see docs/architecture.md
            cause = root_cause(error)
            # A restart of the generator starts a new engine; further groups would fail too.
            if isinstance(cause, EngineDead):
                raise
            if isinstance(cause, RewardError) and "function_failure" in self._config.reward.stop_on:
                raise
            reason = next(reason for kind, reason in _REASONS if isinstance(cause, kind))
            if await self._rollouts.is_outage(cause):
                reason = DropReason.SCORING_OUTAGE
                self._outage = f"scoring: {cause}"
                # A server or a verifier that is away comes back; a function with a fault does not.
                self._num_failed += isinstance(cause, RewardError) and not self._may_recover
                if self._num_failed >= _MOST_FAILED:
                    # The groups stay issued, so that a resumed run makes them again.
                    raise RewardError(
                        f"{self._num_failed} groups in a row could not be scored; the last reason:"
                        f" {cause}. Correct it, then run async-rl resume; no prompt is lost"
                    ) from error
            message = f"{type(cause).__name__}: {cause}"
            if not isinstance(cause, AsyncRLError):
                message += raised_at(cause)
            await self._fail(ticket, reason, message)
        else:
            self._outage = ""
            self._num_failed = 0
            self._num_in_a_row = 0
            await self._put(group)
            self._on_closed(ticket)
        finally:
            self._in_flight[ticket.group_id] -= 1
            written()

    async def _put(self, group: Group) -> None:
        try:
            request = PutGroup(payload=memoryview(pack_group(group)))
            await self._context.call_buffer(request)
        except ProtocolError as error:
            # The buffer has failed the attempt and counted it; other groups may be valid.
            self._context.log.error("%s", error)

    async def _fail(self, ticket: Ticket, reason: DropReason, message: str) -> None:
        # First, so that no attempt starts with the answers that this attempt was served.
        self._on_closed(ticket)
        if reason not in (DropReason.NOT_TAKEN, DropReason.SCORING_OUTAGE):
            self._num_in_a_row += 1
            if self._num_in_a_row > _MOST_IN_A_ROW:
                self._outage = f"every group fails: {message}"
                reason = DropReason.SCORING_OUTAGE
        self._context.activity.count(f"failures/{reason}", 1)
        self._context.log.warning(
            "group %d, attempt %d: %s: %s", ticket.group_id, ticket.attempt, reason, message
        )
        request = FailGroup(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            reason=reason,
            message=message,
        )
        await self._context.call_buffer(request)


def _with_common_prompts(group: Group) -> Group:
    baseline = [] if group.baseline is None else [group.baseline]
    members = with_common_prompt([*group.trajectories, *baseline])
    last = members.pop() if baseline else None
    return replace(group, trajectories=members, baseline=last)


def with_common_prompt(samples: Sequence[Trajectory]) -> list[Trajectory]:
    """Let the tokens that all samples of a group read first be a part of their prompt.

    The ticket's prompt alone is often no part of what agents read: mostly their own prompt. A group
    has its prompt once, in messages, in the store and in the learner's rows.
    """
    start = samples[0].prompt_length
    ends = []
    for sample in samples:
        is_sampled = sample.versions[start:] != NO_VERSION
        ends.append(start + int(is_sampled.argmax()))
        ends.extend(first for first, _ in sample.branches if first > start)
    rows = np.stack([sample.token_ids[start : min(ends)] for sample in samples])
    size = int((rows == rows[0]).all(0).cumprod().sum())
    if not size or len({dict(sample.branches).get(start) for sample in samples}) > 1:
        return list(samples)
    return [_with_prompt(sample, start + size) for sample in samples]


def _with_prompt(sample: Trajectory, length: int) -> Trajectory:
    moved = length - sample.prompt_length
    # Steps and calls count the tokens of the response; a trained call ends after the prompt.
    steps = [replace(s, end_tokens=max(0, s.end_tokens - moved)) for s in sample.score.steps]
    score = replace(sample.score, steps=tuple(steps))
    calls = [replace(c, end_tokens=max(0, c.end_tokens - moved)) for c in sample.calls]
    return replace(sample, prompt_length=length, score=score, calls=tuple(calls))
