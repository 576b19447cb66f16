"""One version of the weights as data: its tensors, and the source that a generator reads.

Each medium has one struct here, the address that travels with a push, and one file in
`weights/` with both of its halves.
"""

from typing import Literal

from async_rl.core.frozen import Value
from async_rl.protocol.base import Message, Request


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

    path: a file to map (/proc/<pid>/fd/<n> of a memfd, so no memory outlives its owners). The block
    starts with a header that carries `version`; a reader checks it before and after reading.
    checksum: over the bytes of all tensors, in order.
    life: the learner's, as in protocol/buffer.py `Synced`; a generator refuses earlier ones.
    """

    version: int
    path: str
    tensors: list[TensorEntry]
    total_bytes: int
    checksum: int
    life: int = 0


class Difference(Value):
    """What changed since version `base`. manifest: of the lists, int16 [2, C] for each tensor of
    the version, as weights/tensors.py makes them.
    """

    base: int
    manifest: Manifest


class _Source(Value, tag_field="type", tag=True):
    """Base of the sources, which carry their class name on the wire."""


class SharedBlock(_Source):
    """The block at the path of the manifest, for generators on the learner's machine."""


class StoredFile(_Source):
    """A safetensors file at an fsspec URL.

    difference: null = the file has all tensors; otherwise the lists of what changed.
    scaling: null = it has weights, or it is a directory of PEFT's form on this machine; otherwise
    an adapter, whose products are multiplied by this.
    checksum: of the bytes of an adapter's file.
    """

    url: str
    difference: Difference | None = None
    scaling: float | None = None
    checksum: int = 0


class Seat(_Source):
    """The ranks of one member in a communicator: the first are `senders` of the learner, a member
    has consecutive ranks from `first_rank`.

    communicator: its name, new for each set of members; a rank that already has a communicator of
    this name uses it again.
    store: address of the server where the ranks meet; secret: the keys of its clients follow from
    it; host: the address of the member's own machine to bind.
    timeout_s: a rank fails that waits for longer than this for the other ranks, or for a bucket.
    difference: null = all tensors are sent; otherwise the lists of what changed.
    """

    communicator: str
    backend: Literal["gloo", "nccl"]
    store: str
    secret: str
    host: str
    world_size: int
    first_rank: int
    # Tensors are sent in buckets, so a member needs room for a bucket, not for a second model.
    bucket_bytes: int
    timeout_s: float
    difference: Difference | None = None
    senders: int = 1


class Mapped(Message):
    """The rank can send parts of the block. device: its own, as in Register."""

    device: str


class MapBlock(Request):
    """Rank 0 of the learner -> another rank: map the block. Raises WeightsError where it is not."""

    Reply = Mapped
    manifest: Manifest


class SendPart(Request):
    """Rank 0 of the learner -> a rank that maps the block: take part in a broadcast as this rank of
    its communicator. Answered when all is sent; raises BroadcastBroken, SenderLate.

    seat: of any member.
    """

    manifest: Manifest
    seat: Seat
    rank: int


class StopSending(Request):
    """Rank 0 of the learner -> a rank that sends a part: give up."""


class Written(Message):
    """How often the key has been written by now."""

    number: int


class Put(Request):
    """A rank -> the rendezvous: write a value for its communicator, if it has none."""

    Reply = Written
    communicator: str
    key: str
    value: bytes


class Found(Message):
    """The values, in the order of the request; null if one was not written in time."""

    values: list[bytes] | None


class LookUp(Request):
    """A rank -> the rendezvous: answer once all these keys have values, or after wait_s."""

    Reply = Found
    communicator: str
    keys: list[str]
    wait_s: float


SHARED_BLOCK = SharedBlock()

Source = SharedBlock | StoredFile | Seat
