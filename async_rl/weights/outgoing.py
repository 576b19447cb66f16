"""The pieces of a broadcast: buckets of whole tensors, contiguous parts of the block as
`block.layout` arranges it, and over NCCL their way through the GPUs of the learner, which train.

A copy from ordinary memory, or on the default stream, waits for everything that training has
enqueued there: each piece would wait for the rest of a step. So the block is page-locked, and
copies and NCCL follow a stream of their own, with a high priority.
Invariant: two pieces are under way at most. While NCCL sends one, the next one is copied.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from async_rl.config.run import PIECE_BYTES
from async_rl.core.frozen import frozen
from async_rl.core.sequences import divided
from async_rl.protocol.weights import Manifest, Seat, TensorEntry
from async_rl.weights.tensors import Tensors, tensor_of


class Outgoing:
    """Two buffers on the GPU, kept between versions.

    piece_bytes: size of the largest piece. cuda: torch.cuda, or a recorder of its calls.
    """

    def __init__(self, device: torch.device, *, piece_bytes: int, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        # The lowest number is the highest priority: the copies start before kernels of a step that
        # are enqueued already.
        self._stream = cuda.Stream(device, priority=-1)
        with cuda.stream(self._stream):
            # Here: torch's cache then gives no memory that another stream may still use.
            buffers = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turns = itertools.cycle(buffers)
        # After the newest copy to one of them.
        self._copied = cuda.Event()

    def in_use(self) -> AbstractContextManager[object]:
        """Make the stream the current one of this thread, for NCCL too."""
        stream: AbstractContextManager[object] = self._cuda.stream(self._stream)
        return stream

    def stage(self, source: torch.Tensor) -> torch.Tensor:
        """uint8 [N], page-locked -> a copy on the GPU, complete for work of the current stream."""
        flat = self.room(source.numel()).copy_(source, non_blocking=True)
        self._copied.record(self._cuda.current_stream(flat.device))
        return flat

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the GPU, for a piece that another rank sends.

        The piece before the previous one must be sent: this one gets its buffer.
        """
        buffer: torch.Tensor = next(self._turns)
        return buffer[:num_bytes]

    @property
    def is_copying(self) -> bool:
        """The newest piece has not reached the GPU, so NCCL waits for this rank."""
        return not self._copied.query()


class Unstaged:
    """The same between main memories, where pieces are sent from the block."""

    def in_use(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def stage(self, source: torch.Tensor) -> torch.Tensor:
        """Return the source."""
        return source

    def room(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8)


BUCKET_BYTES = {"gloo": 64 << 20, "nccl": PIECE_BYTES}
"""Largest piece. Large enough that the latency of a call does not count: main memory sends about 2
GB/s, a GPU 25 and more.
"""


@frozen
class Bucket:
    """A contiguous part of the block, [begin, end) in bytes, and the tensors in it."""

    begin: int
    end: int
    entries: Sequence[TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Size, including the padding after each tensor."""
        return self.end - self.begin

    def tensors(self, flat: torch.Tensor) -> Tensors:
        """flat: uint8 [size_bytes] -> each tensor with its name, a view."""
        for entry in self.entries:
            begin = entry.offset - self.begin
            yield entry.name, tensor_of(entry, flat[begin : begin + entry.size_bytes])


def senders(seat: Seat) -> Iterator[int]:
    """Yield the rank that sends each piece: the ranks of the learner in turn.

    Changed words are few, and only rank 0 has them.
    """
    return itertools.cycle(range(seat.senders if seat.difference is None else 1))


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Return the buckets in the order of the block.

    A bucket above bucket_bytes has a single tensor, which is larger than that.
    """
    ends = [*(entry.offset for entry in manifest.tensors[1:]), manifest.total_bytes]
    placed = zip(manifest.tensors, ends, strict=True)
    # A tensor is never divided: the receiver passes whole tensors to the engine.
    parts = divided((((entry, end), end - entry.offset) for entry, end in placed), bucket_bytes)
    buckets = []
    for part in parts:
        entries = [entry for entry, _ in part]
        _, end = part[-1]
        buckets.append(Bucket(begin=entries[0].offset, end=end, entries=entries))
    return buckets
