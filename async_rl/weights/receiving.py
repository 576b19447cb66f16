"""The receiving ranks of a broadcast, as weights/broadcast.py describes it.

The pieces of a broadcast: buckets of whole tensors, contiguous parts of the block as
`block.layout` arranges it, and over NCCL their way through the GPUs of the learner, which train.

A copy from ordinary memory, or on the default stream, waits for everything that training has
enqueued there: each piece would wait for the rest of a step. So the block is page-locked, and
copies and NCCL follow a stream of their own, with a high priority.
Invariant: two pieces are under way at most. While NCCL sends one, the next one is copied.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from async_rl.config.run import PIECE_BYTES
from async_rl.core.errors import BroadcastBroken
from async_rl.core.frozen import frozen
from async_rl.core.sequences import divided, one_ahead
from async_rl.core.types import NO_VERSION
from async_rl.protocol.weights import Manifest, Seat, TensorEntry
from async_rl.weights.communicator import Communicator, begin, join
from async_rl.weights.tensors import Tensors, require_checksum, tensor_of, word_sum


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


class Seated:
    """One rank's communicator, kept from one version to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name: str  # of the communicator
        self._communicator: Communicator | None = None

    def joined(self, seat: Seat, rank: int) -> Communicator:
        """Return the communicator of the seat; connects it first if it is a new one."""
        # Another name: other members, or a broken load. The old connections are of no use then.
        if self._communicator is None or self._name != seat.communicator:
            self.leave()
            self._communicator = join(seat, rank, self._device)
            self._name = seat.communicator
        return self._communicator

    def cancel(self) -> None:
        """Let a broadcast over NCCL fail now, from any thread."""
        communicator = self._communicator
        if communicator is not None:
            communicator.cancel()

    def leave(self) -> None:
        """Close the connections."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


class BroadcastReceiver(Seated):
    """One receiving rank. rank: among the ranks of its generator; device: of the engine's model."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(device)
        self._rank = rank
        # Until the next load if this one fails: an abort that hangs may still write there.
        self._newest = deque[torch.Tensor](maxlen=2)
        self._one_at_a_time = threading.Lock()
        self._version = NO_VERSION

    @contextmanager
    def receive(
        self, manifest: Manifest, seat: Seat, *, takes_changes: bool = False
    ) -> Iterator[Tensors]:
        """Yield copies of the tensors as they arrive, or of the lists of the seat's difference.

        Unless all are received, the rank leaves the communicator, so that the other ranks notice.
        takes_changes: false = a difference is received, and BroadcastBroken raised.
        """
        sent = manifest if seat.difference is None else seat.difference.manifest
        # A load that was given up may still receive in its thread.
        with self._one_at_a_time:
            before = self._version
            self._version = NO_VERSION
            checksums: list[torch.Tensor] = []
            is_whole = False
            try:
                tensors = self._received(sent, seat, checksums)
                if seat.difference and not (takes_changes and before == seat.difference.base):
                    # All ranks have to take part.
                    for _ in tensors:
                        pass
                    raise BroadcastBroken(
                        f"this engine takes no changes from version {seat.difference.base}"
                    )
                yield tensors
                is_whole = len(checksums) == len(buckets(sent, seat.bucket_bytes))
                total = sum(int(part) for part in checksums) % 2**64
                require_checksum(sent, total, "as received")
                self._version = manifest.version
                self._newest.clear()
            finally:
                if not is_whole:
                    self.leave()

    def _received(self, manifest: Manifest, seat: Seat, checksums: list[torch.Tensor]) -> Tensors:
        communicator = self.joined(seat, seat.first_rank + self._rank)
        ranks = senders(seat)

        def begun() -> Iterator[tuple[Bucket, torch.Tensor, list[Callable[[], None]]]]:
            for bucket in buckets(manifest, seat.bucket_bytes):
                # A new one, because an engine may keep a tensor until its layer is complete.
                flat = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=communicator.device)
                self._newest.append(flat)
                pieces = torch.split(flat, seat.bucket_bytes)
                finishes = [
                    begin(communicator, piece, next(ranks), timeout_s=seat.timeout_s)
                    for piece in pieces
                ]
                yield bucket, flat, finishes

        for bucket, flat, finishes in one_ahead(begun()):
            for finish in finishes:
                finish()
            # On its device: to read it here would wait for the engine's copies.
            checksums.append(word_sum(flat))
            yield from bucket.tensors(flat)
