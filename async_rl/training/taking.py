"""The way of a batch to the ranks: rank 0 takes the heads of its groups, then every rank reads the
tokens of its own sequences from the buffer.

Invariants
- A message has at most `CHUNK_TOKENS` tokens, or one longer sequence. So the memory of a batch on
  its way does not depend on the size of the batch.
- The union of the parts is the batch, each sequence once, because all ranks compute the same
  owners. The ranks of a context read the same part.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from async_rl.batching.batch import BatchPart
from async_rl.core.heads import GroupHead, sample_ids
from async_rl.core.sequences import divided
from async_rl.core.types import Trajectory
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import (
    ReadSequences,
    Sequences,
    TakeBatch,
    TakenGroups,
)
from async_rl.runtime.context import ProcessContext
from async_rl.training.device import Device
from async_rl.training.operations import Fetch

_WAIT_S = 10.0
"""The buffer answers after this long, so that a request whose answer was lost is sent again."""
CHUNK_TOKENS = 2**22
"""33 MB on the wire; larger messages are not faster, and sender and receiver hold copies of one."""


class Taker:
    """Rank 0: takes batches from the buffer, across its restarts, and lets the ranks read them.

    fetch: `TrainingPool.fetch`.
    """

    def __init__(
        self,
        context: ProcessContext,
        device: Device,
        fetch: Callable[..., Awaitable[None]],
        *,
        life: int,
    ) -> None:
        self._life = life
        self._fetch = fetch
        self._config = context.config
        self._device = device
        self._call_buffer = context.call_buffer

    async def take(self, first: int) -> list[list[GroupHead]]:
        """Return the batches to train from version `first` on, once every rank has its sequences.

        One batch; on a shared device the batches of all steps up to the next push.
        """
        # On a shared device all steps up to a push are one handover: generators sleep in between.
        every = self._config.weights.push_every_steps if self._device.is_shared else 1
        # The next multiple of push_every_steps, where the learner pushes.
        end = min(first + every - first % every, self._config.num_steps)
        batches = []
        for version in range(first, end):
            batches.append(await self._take(version))
            # Twice: the buffer may die and come back.
            timeout_s = 2 * self._config.timeouts.start_s
            await self._fetch(batches[-1], version, life=self._life, timeout_s=timeout_s)
        return batches

    async def _take(self, train_version: int) -> list[GroupHead]:
        """Return the batch that will be trained on weights of `train_version`.

        The supervisor ends a run in which none comes (timeouts.stall_s).
        """
        request = TakeBatch(life=self._life, train_version=train_version, wait_s=_WAIT_S)
        while True:
            taken: TakenGroups = await self._call_buffer(request, wait_s=_WAIT_S)
            if taken.groups:
                return taken.groups


class Parts:
    """One rank: the parts of batches that it has read and not yet trained.

    call_buffer: `ProcessContext.call_buffer`; number: of this rank's part in each batch.
    """

    def __init__(self, call_buffer: Callable[[Message], Awaitable[Any]], number: int) -> None:
        self._call_buffer = call_buffer
        self._number = number
        self._requests: dict[int, Fetch] = {}
        self._parts: dict[int, BatchPart] = {}

    async def fetch(self, request: Fetch, owners: Sequence[int]) -> None:
        """Read this rank's sequences of a batch. owners: the part of each sequence."""
        version = request.train_version
        self._requests[version] = request
        samples = [sample for group in request.heads for sample in group.samples]
        named = zip(sample_ids(request.heads), samples, owners, strict=True)
        mine = {name: sample.num_tokens for name, sample, owner in named if owner == self._number}
        trajectories: list[Trajectory] = []
        for chunk in divided(mine.items(), CHUNK_TOKENS):
            read = ReadSequences(life=request.life, train_version=version, samples=chunk)
            reply: Sequences = await self._call_buffer(read)
            # In order of the request, so they pair with `own` of the part.
            trajectories += [packed.unpacked() for packed in reply.trajectories]
        # During the calls another batch may have replaced this one, which was dropped.
        # Compared by content: rank 0 may have sent the same request again.
        if self._requests.get(version) == request:
            self._parts[version] = BatchPart(
                heads=request.heads, owners=owners, number=self._number, trajectories=trajectories
            )

    def pop(self, version: int) -> BatchPart:
        """Return the part for this version and forget it."""
        del self._requests[version]
        return self._parts.pop(version)
