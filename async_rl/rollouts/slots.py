"""The adapters of a service whose weights change while they sample: each has a slot of the engine.

Invariants
- A sample has tokens of one policy: while it runs, its slot is of no other one.
- The weights of a policy never become older, and a sample waits for those that it names.
- An adapter that is refused concerns its policy only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from async_rl.core.checksums import damage
from async_rl.core.errors import DataError, WeightsError
from async_rl.generation.engine import Place, Serves
from async_rl.protocol.base import Message, Ok
from async_rl.protocol.service import LoadSlot, Sample, Sampled
from async_rl.protocol.weights import Manifest, StoredFile
from async_rl.rollouts.sleeping import Sleeping


class _Slot:
    """policy: who has it; num_running: samples."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.policy = ""
        self.num_running = 0

    async def load(self, wanted: LoadSlot | Sample) -> None:
        """Have these weights or newer ones. Raises DataError for damaged or refused ones."""
        if self.place.version >= wanted.version:
            return
        if problem := await asyncio.to_thread(damage, Path(wanted.adapter)):
            raise DataError(f"{wanted.policy}: {problem}; save its weights again")
        # Nothing names the tensors of the base model, which is the same file everywhere.
        manifest = Manifest(version=wanted.version, path="", tensors=[], total_bytes=0, checksum=0)
        try:
            await self.place.load_weights(manifest, StoredFile(url=wanted.adapter))
        except WeightsError as error:
            # It concerns this policy only, and must not end a process.
            raise DataError(str(error)) from error


class Slots:
    """The slots of one engine that serves a service."""

    def __init__(self, sleeping: Sleeping) -> None:
        self._sleeping = sleeping
        self._slots: Sequence[_Slot] = ()
        """The one that has waited longest for a sample is the first."""
        self._changing = asyncio.Condition()
        self._turn = asyncio.Lock()

    async def load(self, request: LoadSlot) -> Message:
        """Load the newest weights of a policy if it has a slot; later samples name them.

        Raises DataError for an adapter that is damaged or refused.
        """
        async with self._changing:
            for slot in self._slots:
                if slot.policy == request.policy:
                    await slot.load(request)
        return Ok()

    async def sample(self, request: Sample) -> Sampled:
        """Draw sequences: from the engine itself if the request names no policy, else as soon as
        the policy has a slot or another one needs its slot no more.

        Raises DataError for a request that the engine refuses, and as `load`, Unavailable if the
        engine died.
        """
        policy = request.policy
        engine = self._sleeping.engine
        assert isinstance(engine, Serves), "a service's configuration asks for such an engine"
        if not policy:
            return await engine.sample(request)
        # In the order of arrival, so that no policy waits forever for the slot of another one.
        async with self._turn, self._changing:
            self._slots = self._slots or [_Slot(place) for place in engine.places]
            if not self._slots:
                raise DataError(
                    "model.lora.slots leaves no slot for samplers of kind inflight; resume the"
                    " service with at least 4"
                )
            slot, *_ = await self._changing.wait_for(lambda: self._usable(policy))
            if slot.policy != policy:
                # It must not be answered by these weights.
                slot.place.clear()
                slot.policy = policy
            self._slots = [*(other for other in self._slots if other is not slot), slot]
            await slot.load(request)
            slot.num_running += 1
        try:
            return await slot.place.sample(request)
        finally:
            slot.num_running -= 1
            async with self._changing:
                self._changing.notify_all()

    def _usable(self, policy: str) -> list[_Slot]:
        own = [slot for slot in self._slots if slot.policy == policy]
        return own or [slot for slot in self._slots if not slot.num_running]
