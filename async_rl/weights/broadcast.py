"""A broadcast: the learner sends the block to all ranks of the generators that load together, in
pieces of bounded size.

A bucket is a contiguous part of the block as `tensors.layout` arranges it, with whole tensors. It
is one piece, unless it is a tensor that is larger than a piece.
Invariants
- A communicator is kept as long as the same lives load together and each of their loads was
  whole. Any other set of lives, and any broken load, gets a new communicator. Its name has the
  number of its first load.
- Sending happens in one thread, one load at a time: two communicators that share a device never run
  together.
- A rank waits for the other ranks, and for each piece, for half of timeouts.push_s, or four times
  the longest piece of the last load: however large the model, it has time as long as bytes arrive.
  The deadline of a member starts when all is sent, so only members that hang are silent by then.
- A rank of the learner that lets the members wait for longer is late, not they. It measures its own
  work, and in its next load they wait for twice as long as that took.
- A rank receives or copies the next piece while the engine takes, or NCCL sends, the previous one.
- The learner's ranks on the machine of rank 0 send in turn, each through its own GPU, in the one
  communicator. A load is sent once each has sent its pieces; if one fails, all of them give up.
- Over NCCL a communicator that is kept carries the changed words only. An engine that cannot change
  words in place takes part, gives up and gets all tensors; no changes are sent from then on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from async_rl.config.run import AutoTransfer
from async_rl.core.errors import (
    AsyncRLError,
    BroadcastBroken,
    DeadlineExceeded,
    SenderLate,
    WeightsError,
)
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import Manifest, MapBlock, Mapped, Seat, SendPart, StopSending
from async_rl.weights.communicator import device_name
from async_rl.weights.media import LONGEST_S, Caller, LearnerSide, Sender
from async_rl.weights.membership import Life, Load, Membership, life_of
from async_rl.weights.receiving import BUCKET_BYTES
from async_rl.weights.rendezvous import Rendezvous
from async_rl.weights.sending import SendingRank
from async_rl.weights.tensors import Changes

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
        self._is_auto = isinstance(learner.config.transfer, AutoTransfer)
        self._device_name = device_name(learner.device)
        self._rank = SendingRank(learner.device, host=learner.host, clock=clock)
        # The other ranks that map the block, with their devices; None until they were asked.
        self._others: list[tuple[Caller, str]] | None = None
        # Those in the newest communicator.
        self._sending: list[Caller] = []
        # Opened by the first load: most runs never broadcast, and need no port.
        self._rendezvous: Rendezvous | None = None
        self._newest: Load | None = None
        # When it started, and the name of its communicator.
        self._begun_s: float
        self._name: str
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
        if not self._is_auto:
            return True
        is_apart = not {_CPU, self._device_name} & set(member.devices)
        return bool(member.devices) and self._device_name != _CPU and is_apart

    async def offer(self, manifest: Manifest) -> None:
        """Let the other ranks of this machine map the block, the first time."""
        if self._others is None:
            others = self._learner.exporter.others
            devices = await asyncio.gather(*(_mapped(other, manifest) for other in others))
            self._others = [pair for pair in zip(others, devices, strict=True) if pair[1]]

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
        self._sending = [
            other for other, device in self._others or () if not (is_apart and device in devices)
        ]
        self._changes = self._learner.exporter.block.changes if is_apart else None
        # Compared with the version that each of these members has.
        if self._changes and (before is None or before.version != self._changes.difference.base):
            self._changes = None
        patience_s = max(
            _PATIENCE * self._learner.push_s, 2 * self._rank.late_s, _SLOWER * self._rank.piece_s
        )
        self._seats = {}
        num_senders = 1 + len(self._sending)
        first_rank = num_senders
        for member in members:
            self._seats[life_of(member)] = Seat(
                communicator=self._name,
                backend=backend,
                store=self._rendezvous.address,
                secret=self._rendezvous.secret,
                host=member.address.removeprefix("tcp://").rpartition(":")[0],
                world_size=len(devices) + len(self._sending),
                first_rank=first_rank,
                bucket_bytes=BUCKET_BYTES[backend],
                timeout_s=patience_s,
                difference=self._changes.difference if self._changes else None,
                senders=num_senders,
            )
            first_rank += len(member.devices)

    async def source(self, manifest: Manifest, load: Load, life: Life) -> Seat:
        """Return the seat of a member of the newest load. Raises BroadcastBroken for others."""
        if load is not self._newest:
            raise BroadcastBroken(f"load {load.number} has ended")
        return self._seats[life]

    async def send(self, manifest: Manifest) -> None:
        """Return once all ranks of the learner have sent the version. Raises BroadcastBroken, or
        SenderLate if one of them is the cause; the members then give up too.
        """
        load = self._newest
        changes = self._changes
        block = changes.content if changes else self._learner.exporter.block.content
        part = SendPart(manifest=manifest, seat=next(iter(self._seats.values())), rank=0)
        others = list(self._sending)
        own = self._rank.send(part, block, begun_s=self._begun_s)
        calls = (
            other.call(replace(part, rank=rank), timeout_s=LONGEST_S)
            for rank, other in enumerate(others, 1)
        )
        parts = [own, *(asyncio.create_task(call, name="send a part") for call in calls)]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if any(each.exception() for each in done):
                # The others wait for it.
                self._call_off()
                self._rank.cancel()
                # A rank of the learner answers at once, also next to a step.
                stops = (other.call(StopSending(), timeout_s=15.0) for other in others)
                await asyncio.gather(*stops, return_exceptions=True)
            await asyncio.wait(parts, timeout=part.seat.timeout_s)
            self._require_sent(parts, part.seat)
        except BroadcastBroken:
            # The survivors may have started their next load already, which must keep its seats.
            if self._newest is load:
                self._newest = None
            raise
        finally:
            for each in parts:
                each.cancel()

    def _require_sent(self, parts: Sequence[asyncio.Future[Any]], seat: Seat) -> None:
        """Raise the error of the rank that is the cause, before the errors of ranks that waited."""
        silent = DeadlineExceeded("it does not answer")
        errors = [part.exception() if part.done() else silent for part in parts]
        for rank, error in enumerate(errors):
            if isinstance(error, AsyncRLError) and type(error) is not BroadcastBroken:
                if rank > 0:
                    self._rank.late_s = max(self._rank.late_s, seat.timeout_s)
                raise SenderLate(f"rank {rank} of the learner: {error}") from error
        for error in errors:
            if error is not None:
                raise error

    async def leave(self, membership: Membership) -> None:
        """End a load that has lost a member: those that still meet give up, and so does this rank,
        which would otherwise wait for the lost one.
        """
        newest = self._newest
        if newest is not None and newest.is_broken:
            self._call_off()
            # Not later: members may still pass on the last pieces among themselves.
            if newest.awaits_sender:
                self._rank.cancel()

    def _call_off(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.call_off(self._name)

    def close(self) -> None:
        """Close the connections, over NCCL also during a load."""
        self._call_off()
        self._rank.close(*([self._rendezvous.close] if self._rendezvous else []))
        # A load that ends now must not call a server that is closed.
        self._rendezvous = None


async def _mapped(other: Caller, manifest: Manifest) -> str:
    """Let a rank map the block. Returns its device; empty on another machine."""
    try:
        # Page-locking takes 0.1 s per GB.
        mapped: Mapped = await other.call(MapBlock(manifest=manifest), timeout_s=600.0)
    except WeightsError:
        return ""
    return mapped.device
