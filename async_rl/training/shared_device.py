"""The learner's side of placement=colocated: it takes the device from the generators, and gives it
back.

takes: the directory of generators
waits for: each that serves to rest, or to be gone; weights.rest_deadline_s at most, and for one
that is new as long as an engine starts
gives: orders to rest; the learner's time on the device, and off it
woken by: an answer, a change of the directory
Who may use the device is decided by `weights/turns.py`; a generator that does not rest in time is
cut off and comes back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from async_rl.core.errors import AsyncRLError, DeadlineExceeded
from async_rl.protocol.generator import Rest
from async_rl.protocol.membership import Member
from async_rl.runtime.context import ProcessContext
from async_rl.weights.membership import Life
from async_rl.weights.turns import Phase, Turns

CutOff = Callable[[set[Life], str], Awaitable[None]]
"""Has the supervisor end these lives, for the reason told."""


class SharedDevice:
    """One life of the learner on a device that is the generators' between its turns."""

    def __init__(self, context: ProcessContext, cut_off: CutOff) -> None:
        self._context = context
        self._cut_off = cut_off
        self._turns = Turns(
            time.time_ns()
        )  # all lives of the learner are on one machine, one after another
        self._heard: set[Life] = set()
        self._answered = asyncio.Event()
        self._shares = _Shares()

    @property
    def turn(self) -> int:
        """The number that orders to generators carry."""
        return self._turns.number

    @property
    def is_learners(self) -> bool:
        """Whether the learner has it."""
        return self._turns.phase is Phase.LEARNING

    async def take(self, enter: Callable[[], Awaitable[None]]) -> None:
        """Returns once no generator uses the device and `enter` has moved the learner to it. No
        push may be under way.
        """
        self._shares.begin(Phase.SWITCHING)
        with self._context.activity.waiting("the device: generators come to rest"):
            await self._context.directory.changed(-1)
            self._turns.ask()
            async with asyncio.TaskGroup() as calls:
                while not await self._told(calls):
                    await self._context.directory.changed_or(self._answered)
            self._turns.take()
        with self._context.activity("moving to the device"):
            await enter()
        self._shares.begin(Phase.LEARNING)

    async def give(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Moves the learner off the device with `leave`; the next pushes wake the generators."""
        self._shares.begin(Phase.SWITCHING)
        with self._context.activity("moving off the device"):
            await leave()
        self._turns.give()
        self._shares.begin(Phase.GENERATING)

    def first_load_s(self, life: Life) -> float:
        """Seconds beyond weights.deadline_s that a push to this life may take: the first one starts
        its engine.
        """
        is_new = life not in self._heard
        self._heard.add(life)
        return self._context.config.supervisor.start_timeout_s if is_new else 0.0

    def metrics(self) -> dict[str, float]:
        """Shares of the time since the last call."""
        return self._shares.since_last()

    async def _told(self, calls: asyncio.TaskGroup) -> bool:
        """Tells whoever serves and was not told yet; whether nobody uses the device."""
        self._answered.clear()
        members = {(m.name, m.pid): m for m in self._context.directory.of_role("generator")}
        self._turns.follow(members)
        for life in self._turns.tell():
            calls.create_task(self._tell(members[life]), name=f"rest {life[0]}")
        return self._turns.is_clear

    async def _tell(self, member: Member) -> None:
        life, weights = (member.name, member.pid), self._context.config.weights
        deadline_s = weights.rest_deadline_s + (
            self._context.config.supervisor.start_timeout_s if life not in self._heard else 0.0
        )
        try:
            await self._context.incarnation_of(member).call(
                Rest(turn=self.turn), timeout_s=deadline_s
            )
        except DeadlineExceeded:
            await self._cut_off(
                {life}, f"it did not come to rest within {deadline_s:g} s (weights.rest_deadline_s)"
            )
        except AsyncRLError as error:
            await self._cut_off(
                {life}, f"it could not come to rest: {type(error).__name__}: {error}"
            )
        else:
            self._turns.rests(life)
        self._answered.set()


_SHARES = {
    Phase.GENERATING: "device/generating_share",
    Phase.SWITCHING: "device/switching_share",
    Phase.LEARNING: "device/learning_share",
}


class _Shares:
    """How the time is divided among the phases."""

    def __init__(self) -> None:
        self._phase = Phase.SWITCHING
        self._since_s = time.monotonic()
        self._seconds = dict.fromkeys(Phase, 0.0)

    def begin(self, phase: Phase) -> None:
        now_s = time.monotonic()
        self._seconds[self._phase] += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def since_last(self) -> dict[str, float]:
        self.begin(self._phase)
        total_s = sum(self._seconds.values()) or 1.0
        shares = {name: self._seconds[phase] / total_s for phase, name in _SHARES.items()}
        self._seconds = dict.fromkeys(Phase, 0.0)
        return shares
