"""The table of media: which senders a transfer setting uses, and which receiver reads a source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from async_rl.protocol.weights import DeviceBlock, Manifest, Seat, SharedBlock, Source
from async_rl.weights.transport.base import LearnerSide, Receiver, Sender, Tensors
from async_rl.weights.transport.broadcast import Broadcaster, BroadcastReceiver
from async_rl.weights.transport.communicator import device_name
from async_rl.weights.transport.filesystem import FileSender
from async_rl.weights.transport.ipc import DeviceReceiver, DeviceSender
from async_rl.weights.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

SENDERS: Mapping[str, tuple[type[Sender], ...]] = {
    "shared_memory": (SharedMemorySender,),
    "filesystem": (FileSender,),
    "collective": (Broadcaster,),
    # A generator that joins after the buffer was freed reads the shared block.
    "ipc": (DeviceSender, SharedMemorySender),
    "auto": (Broadcaster, SharedMemorySender, FileSender),
}
"""Senders by weights.transfer, preferred first: a member uses the first one that reaches it."""

RECEIVERS: Mapping[type[Source], type[Receiver[Any]]] = {
    SharedBlock: SharedMemoryReceiver,
    Seat: BroadcastReceiver,
    DeviceBlock: DeviceReceiver,
}
"""Receivers by source. A StoredFile is not here: `FileReader.localize` turns it into a block."""


def open_senders(learner: LearnerSide) -> list[Sender]:
    """Return the senders of the configured transfer, preferred first."""
    kind = "filesystem" if learner.is_applied else learner.config.transfer.kind
    return [sender(learner) for sender in SENDERS[kind]]


class Receivers:
    """All media in one rank of a generator; arguments as in Receiver."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.device_name = device_name(device)
        """The device that receives weights here, as in Register."""
        self._by_source = {source: receiver(rank, device) for source, receiver in RECEIVERS.items()}

    def receive(self, manifest: Manifest, source: Source) -> AbstractContextManager[Tensors]:
        """As Receiver.receive, by the medium of the source."""
        return self._by_source[type(source)].receive(manifest, source)

    def close(self) -> None:
        """Close the receivers."""
        for receiver in self._by_source.values():
            receiver.close()
