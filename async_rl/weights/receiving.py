"""The receiving ranks of a broadcast, as weights/broadcast.py describes it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from async_rl.core.errors import BroadcastBroken
from async_rl.core.sequences import one_ahead
from async_rl.core.types import NO_VERSION
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.communicator import Communicator, begin, join
from async_rl.weights.outgoing import Bucket, buckets, senders
from async_rl.weights.tensors import Tensors, require_checksum, word_sum


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
