"""How weights are broadcast: a generator's seat in a communicator, and the request to receive a version there.

Part of the protocol of `messages.py`, with the same invariants.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from async_rl.messages import LoadReport, Manifest, Message
from async_rl.types import Value


class Seat(Value):
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


class ReceiveWeights(Message):
    """Receive this version in the communicator and load it, as LoadWeights does. The path in the manifest is of no use here."""

    Reply: ClassVar[type] = LoadReport
    manifest: Manifest
    seat: Seat
