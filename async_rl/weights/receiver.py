"""A version of the weights as torch tensors, out of the learner's block or out of a broadcast. Used
by both engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.transport.buckets import Bucket, bucket_checksum, buckets, tensor_of
from async_rl.weights.transport.communicator import Communicator, broadcast, device_name, join
from async_rl.weights.transport.shared_memory import SharedTensorsReader

Tensors = Iterator[tuple[str, torch.Tensor]]


def tensor_views(reader: SharedTensorsReader) -> Tensors:
    """Each tensor with its name; valid until the reader is closed. Raises WeightsError if shape or
    dtype do not fit.
    """
    for entry, data in reader.tensors():
        yield entry.name, tensor_of(entry, torch.from_numpy(data))


@contextmanager
def weights_from(manifest: Manifest, seat: Seat | None, receiver: Receiver) -> Iterator[Tensors]:
    """Each tensor with its name, to be read to the end; on leaving it is known that they were those
    of the manifest.

    seat: None = the shared block.  Raises WeightsError, GroupBroken if the broadcast came to no
    end.
    """
    if seat is not None:
        with receiver.receiving(manifest, seat) as tensors:
            yield tensors
    else:
        with SharedTensorsReader(manifest) as reader:
            yield tensor_views(reader)
            reader.verify_unchanged()


def verify_block(manifest: Manifest) -> None:
    """Raises WeightsError unless the shared block holds what the manifest says."""
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        reader.verify_unchanged()


class Receiver:
    """One receiving rank of a generator: keeps its communicator, and a buffer, from one version to
    the next.

    rank: among the ranks of this generator; device: where the engine holds the model.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._name = ""
        self._communicator: Communicator | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._one_at_a_time = threading.Lock()

    @property
    def device_name(self) -> str:
        """What receives here, as in Register."""
        return device_name(self._device)

    @contextmanager
    def receiving(self, manifest: Manifest, seat: Seat) -> Iterator[Tensors]:
        """As weights_from. Unless all tensors were received, the communicator is left, so that the
        other ranks hear of it.
        """
        with self._one_at_a_time:
            pieces = buckets(manifest, seat.bucket_bytes)
            checksums: list[int] = []
            is_whole = False
            try:
                yield self._received(pieces, seat, checksums)
                is_whole = len(checksums) == len(pieces)
                if (found := sum(checksums) % 2**64) != manifest.checksum:
                    raise WeightsError(
                        f"checksum of version {manifest.version} as received is {found}, announced"
                        f" {manifest.checksum}"
                    )
            finally:
                if not is_whole:
                    self._leave()

    def _received(self, pieces: Sequence[Bucket], seat: Seat, checksums: list[int]) -> Tensors:
        deadline_s = time.monotonic() + seat.timeout_s
        communicator = self._joined(seat)
        size_bytes = max(piece.size_bytes for piece in pieces)
        if self._buffer.numel() < size_bytes or self._buffer.device != communicator.device:
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=communicator.device)
        for piece in pieces:
            flat = self._buffer[: piece.size_bytes]
            broadcast(communicator, flat, timeout_s=deadline_s - time.monotonic())
            checksums.append(bucket_checksum(flat))
            for name, tensor in piece.tensors(flat):
                yield (
                    name,
                    tensor.clone(),
                )  # an engine may keep it until its layer is complete, and the buffer is used again

    def _joined(self, seat: Seat) -> Communicator:
        if self._communicator is None or self._name != seat.communicator:
            self._leave()
            self._communicator = join(seat, seat.first_rank + self._rank, self._device)
            self._name = seat.communicator
        return self._communicator

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def close(self) -> None:
        """Ends the connections."""
        self._leave()
