"""The two halves of a medium that carries weights: a `Sender` in the learner, and a context manager
that yields the tensors in each rank of a generator. The shared block, the simplest medium, is at
the end.

To add a medium, write one file next to this one with both halves, add its address to
`protocol/weights.py`, and register it in `weights/routes.py`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from async_rl.config.run import AutoTransfer, FileTransfer, WeightsConfig
from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source
from async_rl.weights.adapters import Adapter
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.membership import Life, Load, Membership
from async_rl.weights.tensors import Tensors

LONGEST_S = 86_400.0
"""Far above what a sender may take: a load has limits for each piece, and one for each member that
starts when all is sent.
"""


class Caller(Protocol):
    """The part of an RpcClient that a push needs."""

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Send the request and return its reply; raises AsyncRLError."""


class Exporter(Protocol):
    """The learner's ranks, which own the weights on the device."""

    @property
    def others(self) -> Sequence[Caller]:
        """All ranks but rank 0."""

    @property
    def block(self) -> SharedTensors:
        """The published version, page-locked if the weights are on a GPU."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of the published version; None if all weights are trained."""


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
    """The learner's half; by itself that of the shared block, which each member maps. All methods
    run in the learner's event loop.

    Only a load shows whether a member can open the block: addresses do not say who shares memory. A
    member that cannot raises BlockUnreachable.
    loads_together: members have one load, which they complete or give up together.
    reads_block: a member still reads the learner's block after it has received its source.
    """

    loads_together: ClassVar[bool] = False
    reads_block: ClassVar[bool] = True

    def __init__(self, learner: LearnerSide) -> None:
        self._learner = learner
        self.took: tuple[int, float] = NO_VERSION, 0.0
        """The newest version, and the seconds for which members waited for its source."""

    @property
    def compares(self) -> bool:
        """The next version should be compared with the present one: members may need changes."""
        return False

    def reaches(self, member: Member) -> bool:
        """Return whether this medium may carry the current version to this generator."""
        return True

    async def offer(self, manifest: Manifest) -> None:
        """Prepare a new version. No member reads an older version from now on."""

    def join(self, load: Load, members: Iterable[Member]) -> None:
        """Start a load of these members; only where they load together."""

    async def source(self, manifest: Manifest, load: Load, life: Life) -> Source:
        """Return the source of the version for one member of the load. It is called again if the
        member answers BaseMissing.
        """
        # The manifest has the path of the block already.
        return SHARED_BLOCK

    async def send(self, manifest: Manifest) -> None:
        """Send the version to the members of the newest load; only where they load together.

        Returns once the block is no longer needed. Raises BroadcastBroken, and SenderLate if the
        learner was slower than the members wait.
        """

    async def leave(self, membership: Membership) -> None:
        """Release resources that no member needs any more, after the membership has changed."""

    def close(self) -> None:
        """Release files, threads and connections."""


def folder_of(config: WeightsConfig, run_dir: Path, life: int) -> str:
    """Return the URL of the folder for the files of one life of the learner."""
    transfer = config.transfer
    path = transfer.path if isinstance(transfer, AutoTransfer | FileTransfer) else None
    root = run_dir / "weights" if path is None else f"{path}/{run_dir.name}"
    return f"{root}/life_{life}"


@contextmanager
def receive_block(manifest: Manifest) -> Iterator[Tensors]:
    """Yield views of the block. Verify its checksum before with `verify_block`."""
    with SharedTensorsReader(manifest) as reader:
        # The header once more: a learner that wrote during the reading has torn the views.
        yield reader.tensors()
        reader.verify_unchanged()
