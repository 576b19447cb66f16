"""The adapters of a service whose weights change while they sample: each has a slot of the engine.

Invariants
- A slot is given to another policy only after `FreeSlot`, and a sample has tokens of one policy.
- The weights of a policy never become older, and a sample waits for those that it names.
- An adapter that is refused concerns its policy only.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from async_rl.core.checksums import damage
from async_rl.core.errors import DataError, WeightsError
from async_rl.core.frozen import frozen
from async_rl.generation.engine import Place, Serves
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.generator import FreeSlot
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
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
        self._changing = asyncio.Lock()

    async def load(self, request: LoadSlot) -> Message:
        """Load weights into the slot of a policy, which at first takes a free one.

        Raises DataError if all are taken, and for an adapter that is damaged or refused.
        """
        await self._slot_with(request)
        return Ok()

    async def free(self, request: FreeSlot) -> Message:
        """Free the slot of a policy, if it has one."""
        async with self._changing:
            slot = self._taken.pop(request.policy, None)
            if slot is not None:
                # The next policy must not be answered by these weights.
                slot.place.clear()
        return Ok()

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences, from the engine itself if the request names no policy.

        Raises DataError for a request that the engine refuses, and as `load`, Unavailable if the
        engine died.
        """
        if not request.policy:
            return await self._engine().sample(request)
        slot = await self._slot_with(request)
        sampled = await slot.place.sample(request)
        if self._taken.get(request.policy) is not slot:
            # Another policy may have loaded its weights before the last token.
            raise DataError(f"{request.policy} was unloaded during the sample; ask for it again")
        return sampled

    async def _slot_with(self, wanted: LoadSlot | Sample) -> _Slot:
        """Return the slot of a policy with these weights or newer ones."""
        async with self._changing:
            slot = self._taken.get(wanted.policy)
            if slot is None:
                slot = _Slot(place=self._free_place())
                self._taken[wanted.policy] = slot
            if slot.place.version < wanted.version:
                if problem := await asyncio.to_thread(damage, Path(wanted.adapter)):
                    raise DataError(f"{wanted.policy}: {problem}; save its weights again")
                # Nothing names the tensors of the base model, which is the same file everywhere.
                manifest = Manifest(
                    version=wanted.version, path="", tensors=[], total_bytes=0, checksum=0
                )
                try:
                    await slot.place.load_weights(manifest, StoredFile(url=wanted.adapter))
                except WeightsError as error:
                    # It concerns this policy only, and must not end a process.
                    raise DataError(str(error)) from error
        return slot

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
