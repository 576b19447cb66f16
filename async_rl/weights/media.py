"""The learner's half of the media that carry weights: their interface, `Sender`, which is by itself
the shared block, and files. weights/broadcast.py has the third one, weights/receiving.py the
generators' halves.

To add a medium, write both halves, add its address to `protocol/weights.py`, and register the
sender in `weights/routes.py`.

Files are safetensors at any fsspec URL, for generators that do not share the learner's memory. A
file has one version, its tensors in the manifest's order, version and checksum in its metadata; any
reader of safetensors opens it. Engines that apply an adapter get a file with the adapter. For other
engines, where all tensors have 16 bits, a member that has the previous version gets a file with the
changes.
Invariant: a generator receives the URL of a file only after the file is complete, and compares the
content, or its block after changes, with the manifest of the push.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import fsspec
import torch

from async_rl.config.run import AutoTransfer, FileTransfer, WeightsConfig
from async_rl.core.errors import ConfigError
from async_rl.core.frozen import frozen
from async_rl.core.types import NO_VERSION
from async_rl.protocol.supervisor import Member
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, Source, StoredFile
from async_rl.weights.block import SharedTensors, SharedTensorsReader
from async_rl.weights.lora import Adapter
from async_rl.weights.membership import Life, Load, Membership
from async_rl.weights.tensors import Changes, checksum, part_of, version_header

LONGEST_S = 86_400.0
"""Far above what a sender may take: a load has limits for each piece, and one for each member that
starts when all is sent.
"""
_SUFFIX = ".safetensors"
_Buffer = bytes | memoryview
T = TypeVar("T")


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


class FileSender(Sender):
    """Writes the file of a version when the first member needs it, in a folder (an fsspec URL).

    The configuration is checked so that every generator can open the URL.
    """

    reads_block = False

    def __init__(self, learner: LearnerSide) -> None:
        super().__init__(learner)
        self._folder = learner.folder
        self._has_written = False
        self._loading: set[int] = set()
        self._version = NO_VERSION
        # Only work for this version, by name.
        self._work: dict[str, asyncio.Task[Any]] = {}
        # By member: the version of the file that was offered to it last.
        self._newest_of: dict[Life, int] = {}

    @property
    def compares(self) -> bool:
        """From the second file on; an adapter is sent whole."""
        return self._has_written and not self._learner.is_applied

    async def source(self, manifest: Manifest, load: Load, life: Life) -> StoredFile:
        """Return the URL once the file is complete. Raises ConfigError if it cannot be written."""
        if manifest.version != self._version:
            self._version = manifest.version
            self._work = {}
        previous = self._newest_of.get(life)
        self._newest_of[life] = manifest.version
        adapter = self._learner.exporter.adapter
        if self._learner.is_applied and adapter is not None:
            return await self._once("write adapter", self._write_adapter, manifest, adapter)
        changes = self._learner.exporter.block.changes
        # A second request for this version comes from a member that could not use the changes.
        if changes is None or previous != changes.difference.base:
            return await self._once("write weights", self.write, manifest)
        return await self._once("write changes", self._write_changes, manifest, changes)

    async def _once(self, name: str, work: Callable[..., T], *arguments: object) -> T:
        """Do the work of the present version in a thread, once for all members."""
        if name not in self._work:
            self._work[name] = asyncio.create_task(asyncio.to_thread(work, *arguments), name=name)
        # Other members wait for the same work, so one member's deadline must not cancel it.
        done: T = await asyncio.shield(self._work[name])
        return done

    async def leave(self, membership: Membership) -> None:
        """Note the versions that members still load: their files must stay."""
        self._loading = membership.loading

    def write(self, manifest: Manifest) -> StoredFile:
        """Copy the block into a file; delete files of versions that no member loads.

        Raises ConfigError if the file cannot be written.
        """
        with SharedTensorsReader(manifest) as reader:
            url = self._store(manifest, "version", _pieces(manifest, reader.content))
            # A new version in the block would have mixed two versions in the file.
            reader.verify_unchanged()
        return StoredFile(url=url)

    def _write_changes(self, manifest: Manifest, changes: Changes) -> StoredFile:
        lists = _pieces(changes.difference.manifest, changes.content)
        url = self._store(manifest, "changes", lists)
        return StoredFile(url=url, difference=changes.difference)

    def _write_adapter(self, manifest: Manifest, adapter: Adapter) -> StoredFile:
        content = adapter.to_bytes()
        return StoredFile(
            url=self._store(manifest, "adapter", [content]),
            scaling=adapter.scaling,
            checksum=checksum(content),
        )

    def _store(self, manifest: Manifest, kind: str, content: Iterable[_Buffer]) -> str:
        """Delete old files, write the content into a new one, and return its URL."""
        try:
            fs, folder = fsspec.core.url_to_fs(self._folder)
            path = f"{folder}/{kind}_{manifest.version}{_SUFFIX}"
            fs.makedirs(folder, exist_ok=True)
            if not self._has_written:
                _remove_earlier_lives(fs, folder)
            # Files of versions that a generator still reads stay.
            kept = tuple(f"_{version}{_SUFFIX}" for version in {*self._loading, manifest.version})
            for old in fs.glob(f"{folder}/*{_SUFFIX}"):
                if not old.endswith(kept):
                    fs.rm_file(old)
            with fs.open(path, "wb") as file:
                for piece in content:
                    file.write(piece)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"version {manifest.version} cannot be written to {self._folder} ({error}); set"
                " weights.transfer.path to a directory with enough space"
            ) from error
        self._has_written = True
        return str(fs.unstrip_protocol(path))

    def close(self) -> None:
        """Delete the folder: without the learner's manifest no generator reads its files."""
        if self._has_written:
            # Storage that cannot be reached has no files to delete.
            with contextlib.suppress(OSError):
                fs, folder = fsspec.core.url_to_fs(self._folder)
                for path in fs.glob(f"{folder}/*{_SUFFIX}"):
                    fs.rm_file(path)
                # Not recursively: whatever else is there is not the learner's.
                fs.rmdir(folder)


def _remove_earlier_lives(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Delete the folders `life_<n>` next to this one of learners that were killed.

    Only those of smaller n: a learner that was replaced and still runs must not delete the files of
    its successor.
    """
    parent, _, life = folder.rpartition("/life_")
    for path in fs.ls(parent, detail=False) if life.isdecimal() else ():
        number = path.rstrip("/").rpartition("/life_")[2]
        if number.isdecimal() and int(number) < int(life):
            fs.rm(path, recursive=True)


def _pieces(manifest: Manifest, block: torch.Tensor) -> Iterator[_Buffer]:
    """Yield the content of a file with the tensors of a block, uint8 [its size]."""
    yield version_header(manifest)
    for entry in manifest.tensors:
        yield part_of(block, entry).numpy().data
