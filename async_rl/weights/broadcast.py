"""A broadcast: rank 0, the learner, sends the block to all ranks of the generators that load
together, in buckets of whole tensors.

A bucket is a contiguous part of the block as `block.layout` arranges it, so the learner sends from
the block itself.
Invariants
- A communicator is kept as long as the same lives load together and each of their loads was
  whole. Any other set of lives, and any broken load, gets a new communicator. Its name has the
  number of its first load.
- Sending happens in one thread, one load at a time: two communicators that share a device never run
  together.
- A rank waits for the other ranks, and for each bucket, for half of timeouts.push_s: however large
  the model, it has time as long as bytes arrive. The deadline of a member starts when all is sent,
  so only members that hang are silent by then.
- A learner that lets the members wait for longer is late, not they. It measures its own work, and
  in its next load they wait for twice as long as that took.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

import msgspec
import torch

from async_rl.config.run import AutoTransfer, CollectiveTransfer
from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.core.frozen import frozen
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import Manifest, Seat, TensorEntry
from async_rl.weights.block import SharedTensorsReader, Tensors, require_checksum, tensor_of
from async_rl.weights.communicator import (
    Communicator,
    broadcast,
    device_name,
    join,
)
from async_rl.weights.media import LearnerSide, Sender
from async_rl.weights.membership import Life, Load, Membership, life_of
from async_rl.weights.rendezvous import Rendezvous

_CPU = "cpu"
BUCKET_BYTES = 64 << 20
"""Buffer of a rank; it grows to the size of the largest tensor. Large enough that the latency of a
call does not count, and small next to the memory of a GPU.
"""
# Below 1, so that healthy members answer before the deadline, which would cut them off too.
_PATIENCE = 0.5
"""Share of timeouts.push_s after which a rank stops waiting for a bucket."""


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


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Return the buckets in the order of the block.

    A bucket above bucket_bytes has a single tensor, which is larger than that.
    """
    entries = manifest.tensors
    ends = [*(entry.offset for entry in entries[1:]), manifest.total_bytes]
    result: list[Bucket] = []
    first = 0
    for index in range(1, len(entries) + 1):
        begin = entries[first].offset
        # A tensor is never divided: the receiver passes whole tensors to the engine.
        if index == len(entries) or ends[index] - begin > bucket_bytes:
            result.append(Bucket(begin=begin, end=ends[index - 1], entries=entries[first:index]))
            first = index
    return result


def bucket_checksum(flat: torch.Tensor) -> int:
    """uint8 [N], N a multiple of 8, on any device -> its part of the manifest's checksum: the sum
    of its 64-bit words modulo 2^64.
    """
    return int(flat.view(torch.int64).sum()) % 2**64


class _Seated:
    """One rank's communicator and buffer, kept from one version to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = ""
        self._communicator: Communicator | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def joined(self, seat: Seat, rank: int) -> Communicator:
        # Another name: other members, or a broken load. The old connections are of no use then.
        if self._communicator is None or self._name != seat.communicator:
            self.leave()
            self._communicator = join(seat, rank, self._device)
            self._name = seat.communicator
        return self._communicator

    def buffer(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """uint8 [size_bytes] on `device`, reused by the next call."""
        if self._buffer.numel() < size_bytes or self._buffer.device != device:
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return self._buffer[:size_bytes]

    def leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


class Broadcaster(Sender):
    """Rank 0 of the communicator that is in use."""

    loads_together = True

    def __init__(self, learner: LearnerSide) -> None:
        super().__init__(learner)
        self._transfer = learner.config.transfer
        assert isinstance(self._transfer, AutoTransfer | CollectiveTransfer)
        self._device_name = device_name(learner.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._member = _Seated(learner.device)
        # Opened by the first load: most runs never broadcast, and need no port.
        self._rendezvous: Rendezvous | None = None
        self._newest: Load | None = None
        self._begun_s = 0.0
        self._late_s = (
            0.0  # the longest time that the members of the last load waited for this rank
        )
        self._name = ""
        self._seats: dict[Life, Seat] = {}

    def reaches(self, member: Member) -> bool:
        """With transfer=auto only generators on other GPUs than the learner; else all."""
        if not isinstance(self._transfer, AutoTransfer):
            return True
        is_apart = not {_CPU, self._device_name} & set(member.devices)
        return bool(member.devices) and self._device_name != _CPU and is_apart

    def join(self, load: Load, members: Iterable[Member]) -> None:
        """Assign ranks to the members, one member after another."""
        before = self._newest
        self._newest = load
        self._begun_s = time.monotonic()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._learner.host)
        # Sorted: in a communicator that is kept, each member must have its former rank.
        members = sorted(members, key=life_of)
        # Rank 0 is the learner.
        devices = [self._device_name, *(name for member in members for name in member.devices)]
        # A member that gave up has left its communicator, so the other members would wait in it
        # for ever.
        if before is None or not before.is_whole or before.members != load.members:
            self._name = f"{self._learner.life}.{load.number}"
            self._rendezvous.open(self._name)
        self._seats = {}
        first_rank = 1
        for member in members:
            self._seats[life_of(member)] = Seat(
                communicator=self._name,
                backend=self._backend(devices),
                store=self._rendezvous.address,
                secret=self._rendezvous.secret,
                host=member.address.removeprefix("tcp://").rpartition(":")[0],
                world_size=len(devices),
                first_rank=first_rank,
                bucket_bytes=BUCKET_BYTES,
                timeout_s=max(_PATIENCE * self._learner.push_s, 2 * self._late_s),
            )
            first_rank += len(member.devices)

    async def source(self, manifest: Manifest, load: Load, life: Life) -> Seat:
        """Return the seat of a member of the newest load. Raises BroadcastBroken for others."""
        if load is not self._newest:
            raise BroadcastBroken(f"load {load.number} has ended")
        return self._seats[life]

    def _backend(self, devices: list[str]) -> Literal["gloo", "nccl"]:
        """NCCL requires a different GPU for each rank."""
        return "nccl" if _CPU not in devices and len(set(devices)) == len(devices) else "gloo"

    async def send(self, manifest: Manifest) -> None:
        """Return once this rank has sent the version. Raises BroadcastBroken, or SenderLate if this
        rank is the cause; the members then give up too.
        """
        seat = next(iter(self._seats.values()))
        load = self._newest
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._send, manifest, seat)
        except BroadcastBroken:
            # The survivors may have started their next load already, which must keep its seats.
            if self._newest is load:
                self._newest = None
            raise

    def _send(self, manifest: Manifest, seat: Seat) -> None:
        self._late_s = time.monotonic() - self._begun_s
        try:
            communicator = self._member.joined(
                msgspec.structs.replace(seat, host=self._learner.host), 0
            )
            ready_s = time.monotonic()
            with SharedTensorsReader(manifest) as reader:
                block = torch.from_numpy(reader.block)
                for bucket in buckets(manifest, seat.bucket_bytes):
                    flat = block[bucket.begin : bucket.end]
                    if communicator.device.type != _CPU:
                        # NCCL sends from memory of the GPU only.
                        flat = self._member.buffer(flat.numel(), communicator.device).copy_(flat)
                    self._late_s = max(self._late_s, time.monotonic() - ready_s)
                    broadcast(communicator, flat, timeout_s=seat.timeout_s)
                    ready_s = time.monotonic()
        except BroadcastBroken as error:
            self._member.leave()
            # Near the limit it may have been passed for a member, whose clock started earlier.
            if self._late_s > seat.timeout_s / 2:
                raise SenderLate(
                    f"the learner let the generators wait for {self._late_s:.1f} s, and they wait"
                    f" for {seat.timeout_s:g} s; they try again and wait for twice as long. Free"
                    " its processor and memory, or raise timeouts.start_s"
                ) from error
            raise

    async def leave(self, membership: Membership) -> None:
        """Let members that still meet give up, if their load has lost a member."""
        newest = self._newest
        if self._rendezvous is not None and newest is not None and newest.is_broken:
            self._rendezvous.call_off(self._name)

    def close(self) -> None:
        """Close the connections, after the load that is being sent."""
        if self._rendezvous is not None:
            self._rendezvous.call_off(self._name)
        self._thread.submit(self._leave)
        # A member that hangs would delay the learner's exit until the deadline of its load.
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        self._member.leave()
        if self._rendezvous is not None:
            self._rendezvous.close()


class BroadcastReceiver:
    """One receiving rank. rank: among the ranks of its generator; device: of the engine's model."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._member = _Seated(device)
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def receive(self, manifest: Manifest, seat: Seat) -> Iterator[Tensors]:
        """Yield copies of the tensors as they arrive.

        Unless all are received, the rank leaves the communicator, so that the other ranks notice.
        """
        # A load that was given up may still receive in its thread, into the same buffer.
        with self._one_at_a_time:
            checksums: list[int] = []
            is_whole = False
            try:
                yield self._received(manifest, seat, checksums)
                is_whole = len(checksums) == len(buckets(manifest, seat.bucket_bytes))
                require_checksum(manifest, sum(checksums) % 2**64, "as received")
            finally:
                if not is_whole:
                    self._member.leave()

    def _received(self, manifest: Manifest, seat: Seat, checksums: list[int]) -> Tensors:
        communicator = self._member.joined(seat, seat.first_rank + self._rank)
        pieces = buckets(manifest, seat.bucket_bytes)
        largest = self._member.buffer(
            max(piece.size_bytes for piece in pieces), communicator.device
        )
        for piece in pieces:
            flat = largest[: piece.size_bytes]
            broadcast(communicator, flat, timeout_s=seat.timeout_s)
            checksums.append(bucket_checksum(flat))
            for name, tensor in piece.tensors(flat):
                # Cloned: an engine may keep it until its layer is complete, and the next bucket
                # overwrites the buffer.
                yield name, tensor.clone()

    def close(self) -> None:
        """Close the connections."""
        self._member.leave()
