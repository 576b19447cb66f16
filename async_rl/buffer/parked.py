"""The parked requests of generators, and the distribution of tickets among them.

Invariants
- Evaluation goes before training; a generator of a pool for one of them gets nothing of the other.
- Each ticket goes to the parked generator with the fewest groups.
- A newer request of a generator answers its parked one.
"""

import asyncio
import collections
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from async_rl.buffer.state import BufferState
from async_rl.config.pools import generator_pools, pool_of, purposes_of
from async_rl.config.run import RunConfig
from async_rl.core.types import Purpose, Ticket
from async_rl.protocol.buffer import RequestWork


@dataclass(slots=True, kw_only=True)
class Parked:
    """One request. done: it is to be answered now."""

    request: RequestWork
    purposes: frozenset[Purpose]
    tickets: list[Ticket]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class ParkedRequests:
    """At most one request per generator.

    clock: monotonic seconds. reopen: called when groups that were held back may start.
    """

    def __init__(
        self,
        config: RunConfig,
        state: BufferState,
        *,
        clock: Callable[[], float],
        reopen: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._clock = clock
        self._reopen = reopen
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.TimerHandle | None = None
        self._group_size = config.generation.num_drawn
        self._parked: dict[str, Parked] = {}
        # Only such pools can leave an evaluation waiting while other generators serve.
        self._evaluators = [
            pool for pool in generator_pools(config) if purposes_of(config, pool) == {Purpose.EVAL}
        ]

    def add(self, request: RequestWork, tickets: list[Ticket]) -> Parked:
        """Park the request. tickets: those that its reply contains in any case."""
        name = request.generator
        # The generator repeats a request whose reply was lost. Nothing waits for the older one any
        # more, and tickets in its reply would be handed out to no one.
        if name in self._parked:
            self._parked[name].done.set()
        parked = Parked(
            request=request,
            purposes=purposes_of(self._config, pool_of(name)),
            tickets=tickets,
        )
        self._parked[name] = parked
        return parked

    def update_version(self, request: RequestWork) -> bool:
        """Set the weights of the generator's parked request; False if there is none."""
        parked = self._parked.get(request.generator)
        if parked is None or parked.request.incarnation != request.incarnation:
            return False
        parked.request = replace(parked.request, version=request.version, life=request.life)
        return True

    def refusal(self, parked: Parked) -> str:
        """Return why the request gets no ticket, or an empty string."""
        return self._state.refusal(self._version(parked), parked.purposes, self._clock())

    def _version(self, parked: Parked) -> int:
        # Not at its arrival: the learner may go back while it is parked.
        return self._state.lives.surviving(parked.request.life, parked.request.version)

    def remove(self, generator: str) -> None:
        """Answer the generator's request as it is."""
        if generator in self._parked:
            self._parked.pop(generator).done.set()

    def withdraw(self, parked: Parked) -> None:
        """The request is answered; a newer one of the same generator stays."""
        if self._parked.get(parked.request.generator) is parked:
            del self._parked[parked.request.generator]

    def serve(self) -> None:
        """Hand out the tickets that admission allows."""
        now_s = self._clock()
        # Evaluation first: its groups are few, and its result is wanted for the present step.
        for purpose in (Purpose.EVAL, Purpose.TRAIN):
            if self._state.num_free(purpose, now_s) > 0:
                self._serve(purpose, now_s)
        if self._opening is not None:
            self._opening.cancel()
        opens_s = self._state.admission.opens_s(now_s)
        if opens_s < math.inf:
            self._opening = self._loop.call_later(opens_s - now_s, self._reopen)

    def _serve(self, purpose: Purpose, now_s: float) -> None:
        loads = []
        for order, (name, parked) in enumerate(self._parked.items()):
            if purpose in parked.purposes and self._credit(parked) > 0:
                loads.append((len(self._state.admission.of_generator(name)), order, name))
        # One ticket at a time, to the generator with the fewest groups. In the order of arrival the
        # first generator would get all free tickets, and all other generators would be idle.
        heapq.heapify(loads)
        # A generator that is refused a training ticket because of its old weights loads newer ones
        # soon. Without a reserve, other generators would take its share before that.
        num_reserved = collections.Counter[str]()
        while loads and num_reserved.total() < self._state.num_free(purpose, now_s):
            load, order, name = loads[0]
            parked = self._parked[name]
            ticket = self._state.hand_out(
                purpose,
                generator=name,
                incarnation=parked.request.incarnation,
                version=self._version(parked),
                now_s=now_s,
            )
            is_served = False
            if ticket is not None:
                parked.tickets.append(ticket)
                parked.done.set()
            elif purpose is Purpose.TRAIN:
                num_reserved[name] += 1
            else:
                # Its weights are older than those to be evaluated, so it would be refused again.
                is_served = True
            # Reserved tickets use its credit. Otherwise one generator that lags would reserve all
            # free tickets, and those that are up to date would be idle.
            if is_served or self._credit(parked) <= num_reserved[name] * self._group_size:
                heapq.heappop(loads)
            else:
                heapq.heapreplace(loads, (load + 1, order, name))

    def _credit(self, parked: Parked) -> int:
        """Samples that it may still get."""
        used = sum(ticket.num_samples for ticket in parked.tickets)
        return parked.request.credit * self._group_size - used

    def waits_for(self, learner_waits_for: str) -> str:
        """Return the wait of the learner, else why generators are refused, and the evaluation
        that no generator takes; empty if nothing waits.
        """
        admission = self._state.admission
        refusals = [
            self.refusal(parked)
            for parked in self._parked.values()
            if Purpose.TRAIN in parked.purposes
        ]
        refusal = next(filter(None, refusals), "")
        reasons = []
        if learner_waits_for:
            reasons.append(f"groups: {learner_waits_for}")
            if refusal:
                reasons.append(refusal)
            elif admission.num_generating == 0:
                reasons.append("no generator requests work")
        elif refusal:
            reasons.append(f"admission: {refusal}")
        version = admission.waiting_evaluation()
        is_served = any(Purpose.EVAL in parked.purposes for parked in self._parked.values())
        is_served = is_served or admission.is_evaluating
        # Without separate pools, evaluations go to any generator and never wait for long.
        if version is not None and self._evaluators and not is_served:
            pools = ", ".join(self._evaluators)
            reasons.append(
                f"evaluation of version {version}: no generator of {pools} requests work"
            )
        return "; ".join(reasons)
