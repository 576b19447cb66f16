"""The learner's use of its device: its own for the whole run, or handed over between learner and
generators (placement=colocated).

`weights/handovers.py` decides who may use a shared device. A generator that does not go to sleep in
time is expelled: the supervisor starts it again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from async_rl.core.errors import AsyncRLError, WeightsError
from async_rl.protocol.generator import Sleep
from async_rl.protocol.supervisor import Expel, Member
from async_rl.runtime.context import ProcessContext
from async_rl.weights.handovers import Handovers
from async_rl.weights.membership import Life, life_of

T = TypeVar("T")


async def expel(context: ProcessContext, lives: set[Life], reason: str) -> None:
    """Have the supervisor end and restart these lives of generators, unless they have left.

    Raises WeightsError if the supervisor does not answer: a generator with old weights or on the
    learner's device must not continue.
    """
    serving = {life_of(member) for member in context.directory.of_role("generator")}
    for name, pid in lives & serving:
        context.activity.count("failures/generator_cut_off", 1)
        request = Expel(name=name, pid=pid, reason=reason)
        try:
            await context.supervisor.call(request)
        except AsyncRLError as error:
            raise WeightsError(
                f"{name} missed a push ({reason}) and could not be removed from the run: {error}"
            ) from error


class Device:
    """A device that no generator uses: taken once and never returned.

    is_shared: generators use the device too.
    """

    is_shared = False

    def __init__(self) -> None:
        self.is_learners = False
        """The learner may use the device now."""

    @property
    def handover(self) -> int:
        """The number that orders to generators have."""
        return 0

    async def take(self, enter: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `enter`, which moves the learner to the device, once no generator
        uses it. No push may be in progress.
        """
        self.is_learners = True
        return await enter()

    async def give_back(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Move the learner off the device with `leave`, if generators need it."""

    def first_load_s(self, life: Life) -> float:
        """Return the seconds beyond timeouts.push_s that a push to this life may take."""
        return 0.0


class SharedDevice(Device):
    """One life of the learner on a device that the generators use between its steps."""

    is_shared = True

    def __init__(self, context: ProcessContext) -> None:
        super().__init__()
        self._context = context
        # Times order the handovers of all lives of the learner: they run on one machine, one after
        # another.
        self._handovers = Handovers(time.time_ns())
        self._pushed: set[Life] = set()
        self._answered = asyncio.Event()

    @property
    def handover(self) -> int:
        """The number that orders to generators have."""
        return self._handovers.number

    async def take(self, enter: Callable[[], Awaitable[T]]) -> T:
        """Order all generators to sleep, then move the learner to the device with `enter`."""
        with self._context.activity.waiting("the device: generators go to sleep"):
            # The first list of members: before it the generators on the device are unknown.
            await self._context.directory.changed(-1)
            # A new number: generators refuse orders of an earlier life of the learner.
            self._handovers.ask()
            async with asyncio.TaskGroup() as calls:
                while not self._order_new(calls):
                    await self._context.directory.changed_or(self._answered)
        self.is_learners = True
        with self._context.activity("moving to the device"):
            return await enter()

    async def give_back(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Move the learner off the device with `leave`; the next pushes wake the generators."""
        with self._context.activity("moving off the device"):
            await leave()
        # Not before the learner has left: from now on a push may wake a generator.
        self.is_learners = False

    def first_load_s(self, life: Life) -> float:
        """The first push to a life also starts its engine."""
        extra_s = self._start_s(life)
        # Noted before the load: a repeated push does not start the engine again.
        self._pushed.add(life)
        return extra_s

    def _start_s(self, life: Life) -> float:
        """Seconds that the engine of a life may still need to start."""
        return 0.0 if life in self._pushed else self._context.config.timeouts.start_s

    def _order_new(self, calls: asyncio.TaskGroup) -> bool:
        """Order new generators to sleep; return whether none uses the device."""
        self._answered.clear()
        members = {life_of(m): m for m in self._context.directory.of_role("generator")}
        for life in self._handovers.to_order(members):
            calls.create_task(self._order(members[life]), name=f"sleep {life[0]}")
        return self._handovers.is_clear(members)

    async def _order(self, member: Member) -> None:
        life = life_of(member)
        deadline_s = self._context.config.timeouts.sleep_s + self._start_s(life)
        caller = self._context.incarnation_of(member)
        try:
            await caller.call(Sleep(handover=self.handover), timeout_s=deadline_s)
        except AsyncRLError as error:
            reason = (
                f"it did not go to sleep within {deadline_s:g} s (timeouts.start_s / 6):"
                f" {type(error).__name__}: {error}"
            )
            await expel(self._context, {life}, reason)
        else:
            self._handovers.sleeps(life)
        # Also after an expulsion, so that `take` reads the directory again.
        self._answered.set()
