"""One engine for several runs (model.lora.slots): the policies of other runs are adapters next to
the engine's own policy. Their generators call this side from rollouts/hosted.py.

Invariant: an error of another run's adapter or request concerns that run only. Only an engine that
is broken for every policy stops the host's process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from async_rl.core.errors import EngineDead, Unavailable, WeightsError
from async_rl.generation.engine import (
    Engine,
    Hosts,
    Place,
    Samples,
    one_completion,
    require_version,
)
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import (
    Complete,
    Continuation,
    Leave,
    LoadWeights,
    Visit,
)
from async_rl.protocol.service import Sample, Sampled
from async_rl.rollouts.sleeping import Sleeping
from async_rl.runtime.context import ProcessContext
from async_rl.wire.rpc import Handler

_GONE_S = 90.0
"""A place whose run has been silent for longer may be given to another."""


@dataclass(slots=True, kw_only=True)
class _Guest:
    """A policy of another run. seen_s: monotonic seconds of its last sign of life."""

    place: Place
    seen_s: float


class Hosting:
    """The policies of other runs on one engine, each in a place that no other run has."""

    def __init__(self, context: ProcessContext, sleeping: Sleeping) -> None:
        self._context = context
        self._sleeping = sleeping
        self._guests: dict[str, _Guest] = {}

    def handlers(self) -> Mapping[type[Message], Handler]:
        """The messages that only other runs send."""
        return {Visit: self._visit, Leave: self._leave}

    def engine(self, policy: str) -> Engine:
        """Return the engine of a policy, empty = this run's. Raises Unavailable without a slot."""
        if not policy:
            return self._sleeping.engine
        if policy not in self._guests:
            raise Unavailable(f"{policy} has no slot here; its generator has to start again")
        # Every request is a sign of life, also one that takes longer than the time to a visit.
        self._guests[policy].seen_s = time.monotonic()
        return self._guests[policy].place

    async def _visit(self, request: Visit) -> Message:
        if request.policy in self._guests:
            self._guests[request.policy].seen_s = time.monotonic()
        else:
            place = self._free_place()
            # Requests of the new policy must not be answered by the weights of the old one.
            place.clear()
            self._guests[request.policy] = _Guest(place=place, seen_s=time.monotonic())
        return Ok()

    def _free_place(self) -> Place:
        engine = self._sleeping.engine
        if not isinstance(engine, Hosts):
            raise Unavailable(
                f"{self._context.run_dir.name} has model.lora.slots=0, so its engines serve no"
                " other run; give model.lora.host a run with model.lora.slots=2 or more"
            )
        taken = [guest.place for guest in self._guests.values()]
        for place in engine.places:
            if place not in taken:
                return place
        # A run that was killed cannot say that it left.
        oldest = min(self._guests, key=lambda name: self._guests[name].seen_s, default="")
        if oldest and time.monotonic() - self._guests[oldest].seen_s >= _GONE_S:
            return self._guests.pop(oldest).place
        raise Unavailable(
            f"the {len(taken)} slots for other runs are taken by {', '.join(sorted(self._guests))};"
            " stop one of them, or raise model.lora.slots of this run when it is resumed"
        )

    async def _leave(self, request: Leave) -> Message:
        self._guests.pop(request.policy, None)
        return Ok()

    async def load(self, request: LoadWeights) -> Message:
        """Load another run's adapter into its slot."""
        with self._context.activity("loading weights"):
            return await self.engine(request.policy).load_weights(request.manifest, request.source)

    async def complete(self, request: Complete) -> Continuation:
        """Continue a row of tokens with the policy of a request. An error of the engine stops this
        process too, so that it starts again.
        """
        engine = self.engine(request.policy)
        require_version(engine.version)
        with self._ending_the_dead():
            done = await one_completion(
                engine, request.request_id, request.token_ids, request.sampling
            )
        return Continuation(completed=done)

    async def sample(self, request: Sample) -> Sampled:
        """Draw the sequences of a service's request; errors as for `complete`. Raises DataError for
        a request that the engine refuses.
        """
        engine = self.engine(request.policy)
        assert isinstance(engine, Samples), "a service's configuration asks for such an engine"
        if request.policy:
            require_version(engine.version)
        with self._ending_the_dead():
            return await engine.sample(request)

    @contextlib.contextmanager
    def _ending_the_dead(self) -> Iterator[None]:
        try:
            with self._context.activity("generating"):
                yield
        except (Unavailable, WeightsError) as error:
            # Another engine may continue the row. No group of this run may be in flight, so nothing
            # else would show that the engine is dead.
            self._context.group.create_task(_end(str(error)), name="engine dead")
            raise Unavailable(f"{self._context.name}: {error}") from error


async def _end(reason: str) -> None:
    raise EngineDead(reason)
