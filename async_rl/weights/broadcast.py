"""A broadcast: rank 0, the learner, sends the block to all ranks of the generators that load
together, in pieces of bounded size.

A bucket is a contiguous part of the block as `block.layout` arranges it, with whole tensors. It is
one piece, unless it is a tensor that is larger than a piece.
Invariants
- A communicator is kept as long as the same lives load together and each of their loads was
  whole. Any other set of lives, and any broken load, gets a new communicator. Its name has the
  number of its first load.
- Sending happens in one thread, one load at a time: two communicators that share a device never run
  together.
- A rank waits for the other ranks, and for each piece, for half of timeouts.push_s, or four times
  the longest piece of the last load: however large the model, it has time as long as bytes arrive.
  The deadline of a member starts when all is sent, so only members that hang are silent by then.
- A learner that lets the members wait for longer is late, not they. It measures its own work, and
  in its next load they wait for twice as long as that took.
- A rank receives or copies the next piece while the engine takes, or NCCL sends, the previous one.
- Over NCCL a communicator that is kept carries the changed words only. An engine that cannot change
  words in place takes part, gives up and gets all tensors; no changes are sent from then on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import msgspec
import torch

from async_rl.config.run import AutoTransfer, CollectiveTransfer
from async_rl.core.errors import BroadcastBroken, SenderLate
from async_rl.core.sequences import one_ahead
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.block import SharedTensorsReader
from async_rl.weights.changes import Changes
from async_rl.weights.communicator import (
    Communicator,
    begin,
    device_name,
)
from async_rl.weights.media import LearnerSide, Sender
from async_rl.weights.membership import Life, Load, Membership, life_of
from async_rl.weights.outgoing import BUCKET_BYTES, Outgoing, buckets
from async_rl.weights.receiving import Seated
from async_rl.weights.rendezvous import Rendezvous

_log = logging.getLogger(__name__)
_CPU = "cpu"
# Below 1, so that healthy members answer before the deadline, which would cut them off too.
_PATIENCE = 0.5
"""Share of timeouts.push_s after which a rank stops waiting for a piece."""
_SLOWER = 4
"""A piece may take this many times as long as the slowest piece of the last load."""


class Broadcaster(Sender):
    """Rank 0 of the communicator that is in use."""

    loads_together = True

    def __init__(self, learner: LearnerSide, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(learner)
        self._clock = clock
        self._transfer = learner.config.transfer
        assert isinstance(self._transfer, AutoTransfer | CollectiveTransfer)
        self._device_name = device_name(learner.device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._member = Seated(learner.device)
        self._outgoing: Outgoing | None = None
        # Opened by the first load: most runs never broadcast, and need no port.
        self._rendezvous: Rendezvous | None = None
        self._newest: Load | None = None
        # When it began, and the name of its communicator.
        self._begun_s: float
        self._name: str
        # Of the last load: the longest time for which members waited for this rank, and the time of
        # its slowest piece.
        self._late_s = self._piece_s = 0.0
        self._seats: dict[Life, Seat] = {}
        # Of the newest load; None if it carries all tensors.
        self._changes: Changes | None = None
        self._uses_nccl = False
        self._takes_changes = True

    @property
    def compares(self) -> bool:
        """Once NCCL is in use, as long as all engines take changes."""
        # Elsewhere engines have packed weights, which words cannot be written into.
        return self._uses_nccl and self._takes_changes

    def reaches(self, member: Member) -> bool:
        """With transfer=auto only generators on other GPUs than the learner; else all."""
        if not isinstance(self._transfer, AutoTransfer):
            return True
        is_apart = not {_CPU, self._device_name} & set(member.devices)
        return bool(member.devices) and self._device_name != _CPU and is_apart

    def join(self, load: Load, members: Iterable[Member]) -> None:
        """Assign ranks to the members, one member after another."""
        before = self._newest
        if self._changes and before and before.gave_up and not before.has_lost:
            _log.warning(
                "an engine of %s cannot change single words; from now on pushes have all weights",
                ", ".join(name for name, _ in sorted(before.gave_up)),
            )
            self._takes_changes = False
        self._newest = load
        self._begun_s = self._clock()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._learner.host)
        # Sorted: in a communicator that is kept, each member must have its former rank.
        members = sorted(members, key=life_of)
        # Rank 0 is the learner.
        devices = [self._device_name, *(name for member in members for name in member.devices)]
        # A member that gave up has left its communicator, so the other members would wait in it
        # for ever.
        if before is None or not before.is_whole or before.members != load.members:
            before = None
            self._name = f"{self._learner.life}.{load.number}"
            self._rendezvous.open(self._name)
        # NCCL requires a different GPU for each rank.
        is_apart = _CPU not in devices and len(set(devices)) == len(devices)
        backend: Literal["gloo", "nccl"] = "nccl" if is_apart else "gloo"
        self._uses_nccl = is_apart
        self._changes = self._learner.exporter.changes if is_apart else None
        # Compared with the version that each of these members has.
        if self._changes and (before is None or before.version != self._changes.difference.base):
            self._changes = None
        patience_s = max(
            _PATIENCE * self._learner.push_s, 2 * self._late_s, _SLOWER * self._piece_s
        )
        self._seats = {}
        first_rank = 1
        for member in members:
            self._seats[life_of(member)] = Seat(
                communicator=self._name,
                backend=backend,
                store=self._rendezvous.address,
                secret=self._rendezvous.secret,
                host=member.address.removeprefix("tcp://").rpartition(":")[0],
                world_size=len(devices),
                first_rank=first_rank,
                bucket_bytes=BUCKET_BYTES[backend],
                timeout_s=patience_s,
                difference=self._changes.difference if self._changes else None,
            )
            first_rank += len(member.devices)

    async def source(self, manifest: Manifest, load: Load, life: Life) -> Seat:
        """Return the seat of a member of the newest load. Raises BroadcastBroken for others."""
        if load is not self._newest:
            raise BroadcastBroken(f"load {load.number} has ended")
        return self._seats[life]

    async def send(self, manifest: Manifest) -> None:
        """Return once this rank has sent the version. Raises BroadcastBroken, or SenderLate if this
        rank is the cause; the members then give up too.
        """
        seat = next(iter(self._seats.values()))
        load = self._newest
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._send, manifest, seat, self._changes)
        except BroadcastBroken:
            # The survivors may have started their next load already, which must keep its seats.
            if self._newest is load:
                self._newest = None
            raise

    def _send(self, manifest: Manifest, seat: Seat, changes: Changes | None) -> None:
        self._late_s = self._clock() - self._begun_s
        self._piece_s = 0.0
        try:
            communicator = self._member.joined(
                msgspec.structs.replace(seat, host=self._learner.host), 0
            )
            self._send_pieces(communicator, manifest, seat, changes)
        except BroadcastBroken as error:
            if self._outgoing is not None and self._outgoing.is_copying:
                self._late_s = max(self._late_s, seat.timeout_s)
            self._member.leave()
            # Near the limit it may have been passed for a member, whose clock started earlier.
            if self._late_s > seat.timeout_s / 2:
                raise SenderLate(
                    f"the learner let the generators wait for {self._late_s:.1f} s, and they wait"
                    f" for {seat.timeout_s:g} s; they try again and wait for twice as long. Free"
                    " its processor and memory, or raise timeouts.start_s"
                ) from error
            raise

    def _send_pieces(
        self,
        communicator: Communicator,
        manifest: Manifest,
        seat: Seat,
        changes: Changes | None,
    ) -> None:
        ready_s = self._clock()

        def begun(
            block: torch.Tensor, stage: Callable[[torch.Tensor], torch.Tensor]
        ) -> Iterator[tuple[float, Callable[[], None]]]:
            nonlocal ready_s
            for bucket in buckets(manifest, seat.bucket_bytes):
                for piece in torch.split(block[bucket.begin : bucket.end], seat.bucket_bytes):
                    flat = stage(piece)
                    begun_s = self._clock()
                    self._late_s = max(self._late_s, begun_s - ready_s)
                    yield begun_s, begin(communicator, flat, timeout_s=seat.timeout_s)
                    ready_s = self._clock()

        largest = min(seat.bucket_bytes, manifest.total_bytes)
        with SharedTensorsReader(manifest) as reader, self._staged(communicator, largest) as stage:
            block = torch.from_numpy(reader.block)
            if communicator.device.type != _CPU:
                # The same bytes, in page-locked memory.
                block = self._learner.exporter.content
            if changes is not None:
                manifest = changes.difference.manifest
                block = changes.content
            for begun_s, finish in one_ahead(begun(block, stage)):
                finish()
                self._piece_s = max(self._piece_s, self._clock() - begun_s)

    def _staged(
        self, communicator: Communicator, piece_bytes: int
    ) -> AbstractContextManager[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield what brings a piece of the block to the communicator's device."""
        if communicator.device.type == _CPU:
            return nullcontext(lambda piece: piece)
        if self._outgoing is None:
            self._outgoing = Outgoing(communicator.device, piece_bytes=piece_bytes)
        return self._outgoing.in_use()

    async def leave(self, membership: Membership) -> None:
        """End a load that has lost a member: those that still meet give up, and so does this rank,
        which would otherwise wait for the lost one.
        """
        newest = self._newest
        if self._rendezvous is not None and newest is not None and newest.is_broken:
            self._rendezvous.call_off(self._name)
            # Not later: members may still pass on the last pieces among themselves.
            if newest.awaits_sender:
                self._member.cancel()

    def close(self) -> None:
        """Close the connections, over NCCL also during a load."""
        if self._rendezvous is not None:
            self._rendezvous.call_off(self._name)
            self._member.cancel()
        self._thread.submit(self._leave)
        # A member that hangs would delay the learner's exit until the deadline of its load.
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        self._member.leave()
        if self._rendezvous is not None:
            self._rendezvous.close()
