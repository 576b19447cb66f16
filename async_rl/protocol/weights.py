"""One version of the weights as data: its tensors, and where a generator reads them."""

from __future__ import annotations

from typing import Literal

from async_rl.core.types import Value


class TensorEntry(Value):
    """One tensor in the shared block: Hugging Face name, torch dtype name, shape, byte offset and
    size.
    """

    name: str
    dtype: str
    shape: list[int]
    offset: int
    size_bytes: int


class Manifest(Value):
    """One version of the weights in memory shared on one host.

    path: a file to map (/proc/<pid>/fd/<n> of a memfd, so nothing outlives its owners).  The block
    starts with a header that carries `version`; a reader checks it before and after reading.
    checksum: over the bytes of all tensors, in order.
    """

    version: int
    path: str
    tensors: list[TensorEntry]
    total_bytes: int
    checksum: int


class Seat(Value, tag_field="type", tag=True):
    """Where the ranks of one member sit in a communicator. The learner is rank 0, a member has
    ranks from `first_rank` on.

    communicator: its name, new for each set of members; who holds a communicator of that name uses
    it again.
    store: host:port of the TCPStore where ranks find each other; host: the address of the member's
    own machine to bind.
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
    """All tensors of a version, packed in the order of the manifest, in memory of a GPU that
    another process maps (CUDA IPC).

    gpu: its UUID.  The rest is what torch needs to map the memory there;
    tests/weights/test_device_block.py tells which is which.
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
