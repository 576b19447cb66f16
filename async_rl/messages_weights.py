"""Where a generator gets a version that is in no block or file: a seat in a communicator, or memory of the GPU it shares with the learner.

Part of the protocol of `messages.py`, with the same invariants.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from async_rl.messages import LoadReport, Manifest, Message
from async_rl.types import Value


class Seat(Value, tag_field="type", tag=True):
    """Where the ranks of one member sit in a communicator. The learner is rank 0, a member has ranks from `first_rank` on.

    communicator: its name, new for each set of members; who holds a communicator of that name uses it again.
    store: host:port of the TCPStore where ranks find each other; host: the address of the member's own machine to bind.
    timeout_s: within which a rank has received a version, or gives up.
    """

    communicator: str
    backend: Literal["gloo", "nccl"]
    store: str
    host: str
    world_size: int
    first_rank: int
    bucket_bytes: int
    timeout_s: float


class DeviceBlock(Value, tag_field="type", tag=True):
    """All tensors of a version, packed in the order of the manifest, in memory of a GPU that another process maps (CUDA IPC).

    gpu: its UUID.  The rest is what torch needs to map the memory there; tests/generation/test_device_block.py tells which is which.
    """

    gpu: str
    size_bytes: int
    offset: int
    handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


Source = Seat | DeviceBlock


class ReceiveWeights(Message):
    """Receive this version from its source and load it, as LoadWeights does. The path in the manifest is of no use here.

    turn: as in LoadWeights.
    """

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    source: Source
    turn: int = 0
