"""A block of tensors in memory that processes of one host share.

The block is a memfd: it has no name in any file system, a process of the same user maps it through
/proc/<pid>/fd/<n>, and the kernel frees it with the last mapping, however the processes exit.
Layout: a header of 64 bytes (magic, version, a counter that is odd while the block is being
written), then the tensors, each aligned to 64 bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import numpy as np
import torch

from async_rl.core.errors import BaseMissing, BlockUnreachable, WeightsError
from async_rl.protocol.weights import SHARED_BLOCK, Manifest, SharedBlock, TensorEntry
from async_rl.weights.membership import Life, Load
from async_rl.weights.transport.base import Receiver, Sender, Tensors
from async_rl.weights.transport.buckets import tensor_of
from async_rl.weights.transport.changes import Bytes, Changes, Words

_HEADER = struct.Struct("<8sqq")
_MAGIC = b"arlwts01"
_NAME = "async_rl_weights"
_ALIGN = 64


class SharedMemorySender(Sender):
    """Members map the learner's block.

    Only a load shows whether a member can open it: addresses do not say who shares memory. A
    member that cannot raises BlockUnreachable.
    """

    async def source(self, manifest: Manifest, load: Load, life: Life) -> SharedBlock:
        """The block of the manifest."""
        return SHARED_BLOCK


class SharedMemoryReceiver(Receiver[SharedBlock]):
    """Reads the block in place."""

    @contextmanager
    def receive(self, manifest: Manifest, _: SharedBlock, /) -> Iterator[Tensors]:
        """Yield views of the block. Verify its checksum before with `verify_block`."""
        with SharedTensorsReader(manifest) as reader:
            yield tensor_views(reader)
            reader.verify_unchanged()


def verify_block(manifest: Manifest) -> None:
    """Raises WeightsError unless the block has the bytes that the manifest announces."""
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        reader.verify_unchanged()


def layout(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> tuple[list[TensorEntry], int]:
    """Arrange (name, dtype, shape, size_bytes) one after another; returns the entries and the size
    of the whole block.
    """
    offset = _ALIGN
    entries = []
    for name, dtype, shape, size_bytes in tensors:
        entries.append(
            TensorEntry(
                name=name, dtype=dtype, shape=list(shape), offset=offset, size_bytes=size_bytes
            )
        )
        offset += -(-size_bytes // _ALIGN) * _ALIGN
    return entries, offset


def checksum(block: Bytes) -> int:
    """Sum of the block's 64-bit words modulo 2^64, the last incomplete word byte by byte.

    As fast as memory, and enough to detect a torn or partial copy.
    """
    words = block[: block.size // 8 * 8].view(np.uint64)
    rest = block[words.size * 8 :]
    return int(np.add.reduce(words, dtype=np.uint64)) + int(np.add.reduce(rest, dtype=np.uint64))


class SharedTensors:
    """The writer of one block, which is reused for every version."""

    def __init__(self, entries: list[TensorEntry], total_bytes: int) -> None:
        self._entries = entries
        self._total_bytes = total_bytes
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, total_bytes)
            self._map = mmap.mmap(self._fd, total_bytes)
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(
                f"cannot share {total_bytes} bytes of weights ({error}); free memory or raise the"
                " limit"
            ) from error
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        # Touch every page now: the first touch is ten times slower than a later write.
        self._bytes[:] = 0
        self._writes = 0

    def write(self, version: int, tensors: Iterable[Bytes | None]) -> Manifest:
        """Copy the tensors, in the order of the entries, and describe the result. None keeps what
        the block has. Raises WeightsError on a size that does not match.
        """
        self._writes += 1
        self._put_header(version, 2 * self._writes - 1)
        for entry, data in zip(self._entries, tensors, strict=True):
            if data is None:
                continue
            if data.size != entry.size_bytes:
                raise WeightsError(
                    f"{entry.name} has {data.size} bytes, {entry.size_bytes} were announced"
                )
            np.copyto(self._bytes[entry.offset : entry.offset + entry.size_bytes], data)
        return self._complete(version)

    def change(self, version: int, base: int, changes: Changes) -> Manifest:
        """Turn version `base` into `version`. Raises BaseMissing unless the block has that one."""
        _, present, counter = _HEADER.unpack_from(self._map)
        if present != base or counter == 0 or counter % 2:
            raise BaseMissing(
                f"changes from version {base} to {version} do not fit a block with version"
                f" {present}, write {counter}"
            )
        self._writes += 1
        self._put_header(version, 2 * self._writes - 1)
        changes.apply(self._bytes[_ALIGN:].view(np.uint16))
        return self._complete(version)

    def _complete(self, version: int) -> Manifest:
        self._put_header(version, 2 * self._writes)
        return Manifest(
            version=version,
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            tensors=self._entries,
            total_bytes=self._total_bytes,
            checksum=checksum(self._bytes[_ALIGN:]),
        )

    def _put_header(self, version: int, counter: int) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, version, counter)

    def close(self) -> None:
        """Free the memory as soon as no reader maps it."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self._map.close()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SharedTensorsReader:
    """The reader of one manifest: `verify()`, then `tensors()`, then `verify_unchanged()`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        fd = _open(manifest)
        try:
            # Copy on write: torch accepts only writable memory without a warning, and no reader
            # may write into the shared pages.
            self._map = mmap.mmap(fd, manifest.total_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{manifest.path} is not {manifest.total_bytes} bytes of weights: {error}"
            ) from error
        finally:
            os.close(fd)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._counter = self._read_counter()

    def _read_counter(self) -> int:
        magic, version, counter = _HEADER.unpack_from(self._map)
        if magic != _MAGIC or version != self._manifest.version or counter % 2:
            raise WeightsError(
                f"the block at {self._manifest.path} has version {version}, write {counter}, "
                f"not a complete version {self._manifest.version}"
            )
        return int(counter)

    def verify(self) -> None:
        """Raises WeightsError unless the bytes are those that the manifest announces."""
        actual = checksum(self._bytes[_ALIGN:])
        if actual != self._manifest.checksum:
            raise WeightsError(
                f"checksum of version {self._manifest.version} is {actual}, announced"
                f" {self._manifest.checksum}"
            )

    def verify_unchanged(self) -> None:
        """Raises WeightsError if the writer has started another version, so that the tensors read
        may be torn.
        """
        if self._read_counter() != self._counter:
            raise WeightsError(
                f"version {self._manifest.version} was overwritten while it was read"
            )

    def tensors(self) -> Iterator[tuple[TensorEntry, Bytes]]:
        """Yield each entry with its bytes, a view of the block that is valid until `close`."""
        for entry in self._manifest.tensors:
            yield entry, self._bytes[entry.offset : entry.offset + entry.size_bytes]

    @property
    def words(self) -> Words:
        """The tensors and their padding, without the header."""
        return self._bytes[_ALIGN:].view(np.uint16)

    @property
    def block(self) -> Bytes:
        """The whole block, header included."""
        return self._bytes

    def close(self) -> None:
        """Unmap the block. While views of it exist, they keep it mapped."""
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensor_views(reader: SharedTensorsReader) -> Tensors:
    """Yield each tensor with its name, valid until the reader is closed. Raises WeightsError if
    shape or dtype do not fit.
    """
    for entry, data in reader.tensors():
        yield entry.name, tensor_of(entry, torch.from_numpy(data))


def _open(manifest: Manifest) -> int:
    try:
        # Check the target first: on another host the path may lead to anything, and opening a pipe
        # would wait for its writer.
        target = os.readlink(manifest.path)
        if target.startswith(f"/memfd:{_NAME}"):
            return os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BlockUnreachable(
            f"weights of version {manifest.version} cannot be mapped from {manifest.path}: {error}"
        ) from error
    raise BlockUnreachable(
        f"weights of version {manifest.version}: {manifest.path} is {target}, not a block of"
        " weights"
    )
