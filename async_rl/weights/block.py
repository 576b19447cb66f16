"""A block of tensors in memory that processes of one host share: the learner writes each version
into it, and generators read it.

The block is a memfd: it has no name in any file system, a process of the same user maps it through
/proc/<pid>/fd/<n>, and the kernel frees it with the last mapping, however the processes exit.
Layout: a header of 64 bytes (magic, version, a counter that is odd while the block is being
written), then the tensors, each aligned to 64 bytes.
Invariant: there is one block for all versions, so a version may be written only while no generator
reads the previous version (`Membership.is_free`).
"""

import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from async_rl.core.closing import Closing
from async_rl.core.errors import BaseMissing, BlockUnreachable, WeightsError
from async_rl.core.types import NO_VERSION
from async_rl.protocol.weights import Difference, Manifest, TensorEntry
from async_rl.weights.tensors import (
    ALIGN,
    Changes,
    Comparison,
    Tensors,
    dtype_of,
    layout,
    listed,
    part_of,
    require_checksum,
    tensor_bytes,
    tensor_of,
    word_sum,
)

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sqq")
_MAGIC = b"arlwts01"
_NAME = "async_rl_weights"


class MappedBlock(Closing):
    """The memory of a block in this process.

    content: uint8 [size of the block], the header included; valid until `close`.
    """

    def __init__(self, fd: int, total_bytes: int, access: int) -> None:
        self._map = mmap.mmap(fd, total_bytes, access=access)
        self.content = torch.frombuffer(self._map, dtype=torch.uint8)
        # torch.cuda, if the memory is page-locked.
        self._cuda: Any = None

    def page_lock(self, cuda: Any) -> None:
        """Let copies between a GPU and the block have the full rate of the bus, unless CUDA
        refuses. cuda: torch.cuda, None = there is no GPU.
        """
        if cuda is None:
            return
        code = cuda.cudart().cudaHostRegister(self.content.data_ptr(), len(self.content), 0)
        if int(code):
            _log.warning(
                "CUDA does not page-lock %d bytes of weights (error %d): pushes are slower",
                len(self.content),
                int(code),
            )
        else:
            self._cuda = cuda

    def close(self) -> None:
        """Unmap the memory."""
        if self._cuda is not None:
            self._cuda.cudart().cudaHostUnregister(self.content.data_ptr())
        del self.content
        # While views of it exist, they keep it mapped.
        with contextlib.suppress(BufferError):
            self._map.close()


class SharedTensors(MappedBlock):
    """The writer of one block.

    changes: from the version before to the present one, if they were compared and are few.
    """

    changes: Changes | None = None

    def __init__(self, specs: Iterable[TensorEntry], cuda: Any = None) -> None:
        """Raises WeightsError if there is too little memory. cuda: as of `page_lock`."""
        self._entries, self._total_bytes = layout(specs)
        # CLOEXEC: a child that inherited the descriptor would keep the memory of a dead learner.
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)  # /proc names it, and its first mode is 777
        try:
            os.ftruncate(self._fd, self._total_bytes)
            super().__init__(self._fd, self._total_bytes, mmap.ACCESS_WRITE)
            # Touch every page now: the first touch is ten times slower than a later write, and
            # page-locking without it takes twice as long as both (measured on an H200).
            self.content.zero_()
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(
                f"cannot share {self._total_bytes} bytes of weights ({error}); free memory or"
                " raise the limit"
            ) from error
        self.page_lock(cuda)
        self._writes = 0
        self._version = NO_VERSION

    def write(
        self,
        version: int,
        tensors: Iterable[torch.Tensor],
        sums: Sequence[torch.Tensor] = (),
        *,
        compares: bool = False,
    ) -> Manifest:
        """Copy the tensors, in the order of the specs, and describe the result. Raises WeightsError
        if the size of a tensor is not the announced one.

        sums: of the tensors where they come from (`summed`); the checksum then covers the way into
        the block, and training does not wait for it. Without them the block is added up.
        compares: find out what changes, where the tensors come from, before it is overwritten.
        """
        # Released before the next lists are made.
        self.changes = None
        # A step changes almost every 32-bit number.
        compares &= all(dtype_of(entry).itemsize == 2 for entry in self._entries)
        comparison = None
        if compares and self._version != NO_VERSION:
            comparison = Comparison(
                self._entries, version=version, base=self._version, cuda=self._cuda
            )
        self._begin(version)
        for entry, data in zip(self._entries, map(tensor_bytes, tensors), strict=True):
            if data.numel() != entry.size_bytes:
                raise WeightsError(
                    f"{entry.name} has {data.numel()} bytes, {entry.size_bytes} were announced"
                )
            target = part_of(self.content, entry)
            if comparison is not None:
                comparison.add(target, data)
            target.copy_(data, non_blocking=self._cuda is not None)
        if self._cuda is not None:
            self._cuda.synchronize()
        if comparison is not None:
            self.changes = comparison.result()
        # Not before the loop, which computes them.
        return self._complete(version, int(torch.stack(list(sums)).sum()) if sums else None)

    def change(
        self, version: int, difference: Difference, lists: Iterable[torch.Tensor]
    ) -> Manifest:
        """Turn another version into this one. lists: of the difference, as bytes.

        Raises BaseMissing unless the block has the version that changes.
        """
        if self._version != difference.base:
            raise BaseMissing(
                f"changes from version {difference.base} to {version} do not fit a block with"
                f" version {self._version}"
            )
        self._begin(version)
        entries = zip(self._entries, difference.manifest.tensors, lists, strict=True)
        for entry, of_list, data in entries:
            words = part_of(self.content, entry).view(torch.int16)
            positions, values = listed(tensor_of(of_list, data), len(words))
            words[positions] = values
        return self._complete(version)

    def _begin(self, version: int) -> None:
        self._version = NO_VERSION
        self._writes += 1
        # An odd counter until the version is complete: a reader then refuses the block.
        self._put_header(version, 2 * self._writes - 1)

    def _complete(self, version: int, total: int | None = None) -> Manifest:
        self._put_header(version, 2 * self._writes)
        self._version = version
        return Manifest(
            version=version,
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            tensors=self._entries,
            total_bytes=self._total_bytes,
            checksum=(int(word_sum(self.content[ALIGN:])) if total is None else total) % 2**64,
        )

    def _put_header(self, version: int, counter: int) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, version, counter)

    def close(self) -> None:
        """Free the memory as soon as no process maps it."""
        super().close()
        os.close(self._fd)


class SharedTensorsReader(MappedBlock):
    """The reader of one manifest: `verify()`, then `tensors()`, then `verify_unchanged()`."""

    def __init__(self, manifest: Manifest, access: int = mmap.ACCESS_COPY) -> None:
        """access: of mmap. Copy on write as a rule: torch accepts only writable memory without a
        warning, and no reader may write into the shared pages.
        """
        self._manifest = manifest
        fd = _open(manifest)
        try:
            super().__init__(fd, manifest.total_bytes, access)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"{manifest.path} is not {manifest.total_bytes} bytes of weights: {error}"
            ) from error
        finally:
            os.close(fd)
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
        """Raise WeightsError unless the bytes are those that the manifest announces."""
        actual = int(word_sum(self.content[ALIGN:])) % 2**64
        require_checksum(self._manifest, actual, "in its block")

    def verify_unchanged(self) -> None:
        """Raise WeightsError if the writer has started another version: tensors may be torn."""
        if self._read_counter() != self._counter:
            raise WeightsError(
                f"version {self._manifest.version} was overwritten while it was read"
            )

    def tensors(self) -> Tensors:
        """Yield each tensor with its name, a view of the block that is valid until `close`. Raises
        WeightsError.
        """
        for entry in self._manifest.tensors:
            yield entry.name, tensor_of(entry, part_of(self.content, entry))


def verify_block(manifest: Manifest) -> None:
    """Raise WeightsError unless the block has the bytes that the manifest announces."""
    with SharedTensorsReader(manifest) as reader:
        reader.verify()
        reader.verify_unchanged()


def _open(manifest: Manifest) -> int:
    try:
        # Check the target first: on another host the path may lead to anything, and opening a pipe
        # would wait for its writer.
        target = os.readlink(manifest.path)
        if target.startswith(f"/memfd:{_NAME}"):
            return os.open(manifest.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BlockUnreachable(
            f"weights of version {manifest.version} cannot be mapped from {manifest.path}: {error}"
        ) from error
    raise BlockUnreachable(
        f"weights of version {manifest.version}: {manifest.path} is {target}, not a block of"
        " weights"
    )
