"""The generators' half of every medium, and the pieces of a broadcast.

A piece of a broadcast (weights/broadcast.py) is a bucket of whole tensors, a contiguous part of the
block as `tensors.layout` arranges it, or a part of one that is larger than a piece.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO

import fsspec
import numpy as np
import torch

from async_rl.config.run import PIECE_BYTES
from async_rl.core.errors import BaseMissing, BroadcastBroken, WeightsError
from async_rl.core.frozen import frozen
from async_rl.core.sequences import divided, one_ahead
from async_rl.core.types import NO_VERSION
from async_rl.protocol.weights import (
    SHARED_BLOCK,
    Manifest,
    Seat,
    SharedBlock,
    Source,
    StoredFile,
    TensorEntry,
)
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.communicator import Communicator, begin, device_name, join
from async_rl.weights.tensors import Tensors, require_checksum, tensor_of, version_header, word_sum

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
        """Let a broadcast fail now, from any thread."""
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


@contextmanager
def opened(source: StoredFile, manifest: Manifest) -> Iterator[IO[bytes]]:
    """Open the file of a version. Raises WeightsError if it cannot be read."""
    try:
        with fsspec.open(source.url, "rb") as file:
            yield file
    except (OSError, ValueError, ImportError) as error:
        raise WeightsError(
            f"version {manifest.version} cannot be read from {source.url}"
            f" (weights.transfer.path): {error}"
        ) from error


class FileReader:
    """Reads a file once per generator, into a block that all of its ranks map.

    The block is reused as long as the tensors keep their shapes.
    """

    def __init__(self) -> None:
        self._block: SharedTensors | None = None
        self._tensors: list[TensorEntry]  # of the block
        self._one_at_a_time = threading.Lock()

    def localize(self, manifest: Manifest, source: Source) -> tuple[Manifest, Source]:
        """Fetch the version if it is in a file; return the source for its ranks."""
        if not isinstance(source, StoredFile):
            return manifest, source
        return self.fetch(source, manifest), SHARED_BLOCK

    def fetch(self, source: StoredFile, manifest: Manifest) -> Manifest:
        """Read the file into the block and return the manifest of the block.

        Raises WeightsError unless the result has the manifest's checksum. It is the subclass
        BaseMissing if the file has changes that do not fit the block: another file may then help.
        """
        with self._one_at_a_time:
            with opened(source, manifest) as file:
                local = self._read(file, source, manifest)
            try:
                require_checksum(manifest, local.checksum, f"from {source.url}")
            except WeightsError as error:
                # The block is neither version now; all tensors will replace it.
                self.close()
                if source.difference is None:
                    raise
                raise BaseMissing(str(error)) from error
        return local

    def _read(self, file: IO[bytes], source: StoredFile, manifest: Manifest) -> Manifest:
        if self._block is None or self._tensors != manifest.tensors:
            self.close()
            self._block = SharedTensors(manifest.tensors)
            self._tensors = manifest.tensors
        difference = source.difference
        content = manifest if difference is None else difference.manifest
        expected = version_header(content)
        if file.read(len(expected)) != expected:
            raise WeightsError(
                f"{source.url} does not have the version {manifest.version} that the learner"
                " announced"
            )
        sizes = (entry.size_bytes for entry in content.tensors)
        # torch takes no read-only memory.
        data = (np.frombuffer(bytearray(file.read(size)), np.uint8) for size in sizes)
        tensors = map(torch.from_numpy, data)
        if difference is None:
            return self._block.write(manifest.version, tensors)
        return self._block.change(manifest.version, difference, tensors)

    def close(self) -> None:
        """Free the block."""
        if self._block is not None:
            self._block.close()
            self._block = None


class Receivers:
    """All media in one rank of a generator.

    rank: among the ranks of this generator; device: of the engine's model.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.device_name = device_name(device)
        """The device that receives weights here, as in Register."""
        self._broadcast = BroadcastReceiver(rank, device)

    def receive(
        self, manifest: Manifest, source: Source, *, takes_changes: bool = False
    ) -> AbstractContextManager[Tensors]:
        """Yield all tensors, to be read to the end; leaving the block verifies them.

        takes_changes: lists of changed words may come instead, if the source is a seat with a
        difference. Raises WeightsError if the bytes differ from the manifest, BroadcastBroken if a
        broadcast failed.
        """
        match source:
            case SharedBlock():
                return _receive_block(manifest)
            case Seat():
                return self._broadcast.receive(manifest, source, takes_changes=takes_changes)
            case StoredFile():
                raise WeightsError("FileReader.localize turns a file into a block before")

    def close(self) -> None:
        """Close the connections of broadcasts."""
        self._broadcast.leave()


@contextmanager
def _receive_block(manifest: Manifest) -> Iterator[Tensors]:
    """Yield views of the block. Verify its checksum before with `verify_block`."""
    with SharedTensorsReader(manifest) as reader:
        # The header once more: a learner that wrote during the reading has torn the views.
        yield reader.tensors()
        reader.verify_unchanged()
