"""A rank's part of each batch: the rank reads only the tokens of its sequences from the buffer.

takes: the heads of a batch from rank 0 · waits for: the buffer · returns: the part of the rank
Invariants
- A message has at most `_CHUNK_TOKENS` tokens, or one longer sequence; so the memory that a batch
  takes on its way does not depend on its size.
- The union of the parts is the batch, each sequence once, because all ranks compute the same
  owners. The ranks of a context read the same part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from async_rl.batching.batch import BatchPart
from async_rl.core.heads import SampleId, sample_ids
from async_rl.core.types import FloatArray, Trajectory
from async_rl.protocol.learner import KeepAdvantages, ReadSequences, Sequences
from async_rl.training.operations import Fetch
from async_rl.weights.routes import Caller

_CHUNK_TOKENS = 2**22
"""33 MB on the wire; larger messages are not faster, and sender and receiver hold copies of one."""


class Parts:
    """The parts that were read and not trained yet. number: that of this rank; call_s: the deadline
    of a chunk.
    """

    def __init__(self, buffer: Caller, number: int, *, call_s: float) -> None:
        self._buffer = buffer
        self._number = number
        self._call_s = call_s
        self._requests: dict[int, Fetch] = {}
        self._parts: dict[int, BatchPart] = {}
        self._life = 0

    async def fetch(self, request: Fetch, owners: Sequence[int]) -> None:
        """Read this rank's sequences of a batch. owners: the part of each sequence."""
        self._life = request.life
        version = request.train_version
        self._requests[version] = request
        samples = [sample for group in request.heads for sample in group.samples]
        named = zip(sample_ids(request.heads), samples, owners, strict=True)
        mine = {name: sample.num_tokens for name, sample, owner in named if owner == self._number}
        trajectories: list[Trajectory] = []
        for chunk in _chunks(mine):
            read = ReadSequences(life=request.life, train_version=version, samples=chunk)
            reply: Sequences = await self._buffer.call(read, timeout_s=self._call_s)
            trajectories += reply.trajectories
        # Another batch may have replaced it.
        if self._requests.get(version) is request:
            self._parts[version] = BatchPart(
                heads=request.heads, owners=owners, number=self._number, trajectories=trajectories
            )

    def pop(self, version: int) -> BatchPart:
        """Return the part for this version and forget it."""
        del self._requests[version]
        return self._parts.pop(version)

    async def keep_advantages(self, advantages: Mapping[SampleId, FloatArray]) -> None:
        """Let the buffer store the advantages of a trained part."""
        for chunk in _chunks({name: len(row) for name, row in advantages.items()}):
            rows = [advantages[name] for name in chunk]
            keep = KeepAdvantages(life=self._life, samples=chunk, rows=rows)
            await self._buffer.call(keep, timeout_s=self._call_s)


def _chunks(num_tokens: Mapping[SampleId, int]) -> Iterator[list[SampleId]]:
    """Divide samples into messages, in order. num_tokens: of each sample."""
    chunk: list[SampleId] = []
    room = _CHUNK_TOKENS
    for name, size in num_tokens.items():
        if chunk and size > room:
            yield chunk
            chunk, room = [], _CHUNK_TOKENS
        chunk.append(name)
        room -= size
    if chunk:
        yield chunk
