"""The learner's side of a broadcast: rank 0 of a communicator with all ranks of the generators that
load together.

Invariants
- A communicator is kept as long as the same lives load together and every one of their epochs came
  to its end; any other set of lives, and any epoch that was given up, gets a new one whose name
  carries the number of the epoch that it was made for.
- Sending happens in one thread, one epoch at a time: communicators that share a device never run
  side by side.
- A rank gives up after half of weights.deadline_s, so that at the deadline only those are silent
  that hang.
Driven by training/pushing.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from async_rl.config.running import WeightsConfig
from async_rl.core.errors import GroupBroken
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import Manifest, Seat
from async_rl.weights.membership import Epoch, Life
from async_rl.weights.transport.buckets import buckets
from async_rl.weights.transport.communicator import (
    Communicator,
    broadcast,
    call_off,
    device_name,
    join,
    open_store,
)
from async_rl.weights.transport.shared_memory import SharedTensorsReader

_CPU = "cpu"
_PATIENCE = 0.5
"""Share of weights.deadline_s."""


class Broadcaster:
    """Rank 0 of the communicator that is in use.

    life: tells this learner process from those before it, which may have used the same address;
    host: of this process in the run.
    """

    def __init__(
        self, config: WeightsConfig, *, life: str, host: str, device: torch.device
    ) -> None:
        self._config = config
        self._life = life
        self._host = host
        self._device = device
        self._device_name = device_name(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._store: TCPStore | None = None
        self._epoch: Epoch | None = None  # the newest
        self._name = ""
        self._joined = ""
        self._communicator: Communicator | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def reaches(self, member: Member) -> bool:
        """Whether this generator gets its weights by broadcast: told to, or by itself where they go
        from GPUs to other GPUs.
        """
        if self._config.transfer == "auto":
            return (
                bool(member.devices)
                and self._device_name != _CPU
                and not {_CPU, self._device_name} & set(member.devices)
            )
        return self._config.transfer == "collective"

    def seats(self, epoch: Epoch, members: Mapping[Life, Member]) -> dict[Life, Seat]:
        """The members' ranks, one member after the other, in the communicator of this epoch."""
        before, self._epoch = self._epoch, epoch
        if before is None or not before.is_whole or before.members != epoch.members:
            self._name = f"{self._life}.{epoch.number}"
        if self._store is None:
            self._store = open_store(self._host)
        world_size = 1 + sum(len(member.devices) for member in members.values())
        address = f"{self._host}:{self._store.port}"
        seats, first_rank = {}, 1
        for life, member in sorted(members.items()):
            host = member.address.removeprefix("tcp://").rpartition(":")[0]
            seats[life] = self._seat(address, host, world_size, first_rank, self._backend(members))
            first_rank += len(member.devices)
        return seats

    def _seat(
        self,
        address: str,
        host: str,
        world_size: int,
        first_rank: int,
        backend: Literal["gloo", "nccl"],
    ) -> Seat:
        return Seat(
            communicator=self._name,
            backend=backend,
            store=address,
            host=host,
            world_size=world_size,
            first_rank=first_rank,
            bucket_bytes=self._config.bucket_mb << 20,
            timeout_s=_PATIENCE * self._config.deadline_s,
        )

    def _backend(self, members: Mapping[Life, Member]) -> Literal["gloo", "nccl"]:
        """NCCL where each rank has a GPU of its own."""
        if self._config.backend != "auto":
            return self._config.backend
        devices = [
            self._device_name,
            *(device for member in members.values() for device in member.devices),
        ]
        return "nccl" if _CPU not in devices and len(set(devices)) == len(devices) else "gloo"

    async def send(self, manifest: Manifest, seats: Mapping[Life, Seat]) -> None:
        """Returns once this rank has sent the version. Raises GroupBroken; the members then give up
        too.
        """
        one = next(iter(seats.values()))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, manifest, one)

    def _send(self, manifest: Manifest, seat: Seat) -> None:
        deadline_s = time.monotonic() + seat.timeout_s
        try:
            communicator = self._joined_to(seat)
            with SharedTensorsReader(manifest) as reader:
                block = torch.from_numpy(reader.block)
                for piece in buckets(manifest, seat.bucket_bytes):
                    flat = self._on_device(block[piece.begin : piece.end], communicator.device)
                    broadcast(communicator, flat, timeout_s=deadline_s - time.monotonic())
        except GroupBroken:
            self._leave()
            self._epoch = None
            raise

    def _on_device(self, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == _CPU:
            return flat
        if self._buffer.numel() < flat.numel() or self._buffer.device != device:
            self._buffer = torch.empty(flat.numel(), dtype=torch.uint8, device=device)
        return self._buffer[: flat.numel()].copy_(flat)

    def _joined_to(self, seat: Seat) -> Communicator:
        if self._communicator is None or self._joined != seat.communicator:
            self._leave()
            own = msgspec.structs.replace(seat, host=self._host)
            self._communicator, self._joined = join(own, 0, self._device), seat.communicator
        return self._communicator

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def end_what_broke(self) -> None:
        """If the newest epoch lost somebody, those who still wait at the store for all ranks to
        come need not wait longer.
        """
        if (
            self._store is not None
            and self._epoch is not None
            and (self._epoch.has_lost or self._epoch.gave_up)
        ):
            call_off(self._store, self._name)

    def close(self) -> None:
        """Ends the thread after what it does, and with it the connections."""
        if self._store is not None:
            call_off(self._store, self._name)
        self._thread.submit(self._leave)
        self._thread.shutdown(wait=False)
