"""The adapters of a service whose weights change while they sample: each has a slot of the engine.

Invariants
- A slot is given to another policy only after `FreeSlot`, and a sample has tokens of one policy.
- An adapter that is refused concerns its policy only.
"""

from __future__ import annotations

from async_rl.core.errors import DataError
from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION
from async_rl.generation.engine import Place, Serves
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import FreeSlot, LoadReport, LoadWeights
from async_rl.protocol.service import Sample, Sampled
from async_rl.rollouts.sleeping import Sleeping


@frozen
class _Slot:
    """A slot as long as one policy has it."""

    place: Place


class Slots:
    """The slots of one engine that serves a service."""

    def __init__(self, sleeping: Sleeping) -> None:
        self._sleeping = sleeping
        self._taken: dict[str, _Slot] = {}

    async def load(self, request: LoadWeights) -> LoadReport:
        """Load weights into the slot of a policy, which at first takes a free one.

        Raises DataError if all are taken, WeightsError for an adapter that is refused.
        """
        if request.policy not in self._taken:
            self._taken[request.policy] = _Slot(place=self._free_place())
        place = self._taken[request.policy].place
        return await place.load_weights(request.manifest, request.source)

    async def free(self, request: FreeSlot) -> Message:
        """Free the slot of a policy, if it has one."""
        slot = self._taken.pop(request.policy, None)
        if slot is not None:
            # The next policy must not be answered by these weights.
            slot.place.clear()
        return Ok()

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences, from the engine itself if the request names no policy.

        Raises DataError for a request that the engine refuses and for a policy without weights,
        Unavailable if the engine died.
        """
        if not request.policy:
            return await self._engine().sample(request)
        slot = self._taken.get(request.policy)
        if slot is None or slot.place.version == NO_VERSION:
            raise DataError(f"{request.policy} has no weights here; save them for sampling again")
        sampled = await slot.place.sample(request)
        if self._taken.get(request.policy) is not slot:
            # Another policy may have loaded its weights before the last token.
            raise DataError(f"{request.policy} was unloaded during the sample; ask for it again")
        return sampled

    def _free_place(self) -> Place:
        taken = [slot.place for slot in self._taken.values()]
        for place in self._engine().places:
            if place not in taken:
                return place
        raise DataError(
            f"the {len(taken)} slots for samplers whose weights change are taken by"
            f" {', '.join(sorted(self._taken))}; unload one of them, or raise model.lora.slots when"
            " the service is resumed"
        )

    def _engine(self) -> Serves:
        engine = self._sleeping.engine
        assert isinstance(engine, Serves), "a service's configuration asks for such an engine"
        return engine
