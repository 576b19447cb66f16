"""The two halves of a medium that carries weights: `Sender` in the learner, `Receiver` in each rank
of a generator.

To add a medium, write one file next to this one with both halves, add its address to
`protocol/weights.py`, and register it in `transport/table.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from async_rl.config.running import WeightsConfig
from async_rl.core.frozen import frozen
from async_rl.protocol.membership import Member
from async_rl.protocol.weights import DeviceBlock, Manifest, Source
from async_rl.weights.membership import Life, Load, Membership
from async_rl.weights.merging import Adapter

Tensors = Iterator[tuple[str, torch.Tensor]]
"""Each tensor of a version with its Hugging Face name."""

Address = TypeVar("Address", bound=Source)


class Exporter(Protocol):
    """The learner's ranks, which own the weights on the device."""

    async def share_on_device(self) -> DeviceBlock:
        """Pack the current weights into a buffer that other processes map."""

    async def unshare_on_device(self) -> None:
        """Free that buffer."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the published version, while its block may not be overwritten; None if all
        weights are trained.
        """


@frozen
class LearnerSide:
    """The facts about the learner that senders need.

    folder: fsspec URL for files. life: distinguishes this learner process from earlier ones, which
    may have used the same address. host: of this process in the run. device: of rank 0. push_s: the
    deadline of a push. is_applied: engines apply the adapter to their base model, so they take
    nothing else.
    """

    config: WeightsConfig
    folder: str
    life: str
    host: str
    device: torch.device
    exporter: Exporter
    push_s: float
    is_applied: bool = False


class Sender:
    """The learner's half. All methods run in the learner's event loop; defaults do nothing.

    loads_together: members have one load, which they complete or give up together.
    reads_block: a member still reads the learner's block after it has received its source.
    """

    loads_together: ClassVar[bool] = False
    reads_block: ClassVar[bool] = True

    def __init__(self, learner: LearnerSide) -> None:
        self._learner = learner

    def reaches(self, member: Member) -> bool:
        """Return whether this medium may carry the current version to this generator."""
        return True

    async def offer(self, manifest: Manifest) -> None:
        """Prepare a new version. No member reads an older one from here on."""

    def join(self, load: Load, members: Iterable[Member]) -> None:
        """Begin a load of these members; only where they load together."""

    async def source(self, manifest: Manifest, load: Load, life: Life) -> Source:
        """Return the source from which a member of the load reads the version; it asks again if
        that raises BaseMissing.
        """
        raise NotImplementedError

    async def send(self, manifest: Manifest) -> None:
        """Send the version to the members of the newest load; only where they load together.

        Returns once the block is no longer needed. Raises BroadcastBroken.
        """

    async def leave(self, membership: Membership) -> None:
        """Release resources that no member needs any more, after the membership has changed."""

    def close(self) -> None:
        """Release files, threads and connections."""


class Receiver(Generic[Address]):
    """The half in one rank of a generator.

    rank: among the ranks of this generator; device: of the engine's model.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device

    def receive(self, manifest: Manifest, source: Address, /) -> AbstractContextManager[Tensors]:
        """Yield all tensors, to be read to the end; leaving the block verifies them.

        Raises WeightsError if they are not those of the manifest, BroadcastBroken if a broadcast
        ended early.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release buffers and connections."""
