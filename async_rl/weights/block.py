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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from async_rl.core.closing import Closing
from async_rl.core.errors import BaseMissing, BlockUnreachable, WeightsError
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.weights.changes import Bytes, Changes, Words

TensorSpec = tuple[str, str, Sequence[int], int]
"""Hugging Face name, torch dtype name, shape, size in bytes."""
Tensors = Iterator[tuple[str, torch.Tensor]]
"""Each tensor of a version with its Hugging Face name."""

_log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sqq")
_MAGIC = b"arlwts01"
_NAME = "async_rl_weights"
# A cache line, and a multiple of the 8 bytes that the checksum adds.
_ALIGN = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor_spec(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """Return the facts that a block needs before its first version. dtype: in the block, None = the
    dtype of the tensor.
    """
    dtype = dtype or tensor.dtype
    size_bytes = tensor.numel() * dtype.itemsize
    return name, str(dtype).removeprefix("torch."), tuple(tensor.shape), size_bytes


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor of any dtype: uint8 [size], a view if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the entry's dtype. Raises WeightsError for a dtype that no medium carries."""
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightsError(
            f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}"
        )
    return dtype


def tensor_of(entry: TensorEntry, flat: torch.Tensor) -> torch.Tensor:
    """uint8 [size_bytes] -> a view of the entry's dtype and shape. Raises WeightsError."""
    dtype = dtype_of(entry)
    try:
        return flat.view(dtype).reshape(entry.shape)
    except RuntimeError as error:
        raise WeightsError(
            f"{entry.name} of shape {entry.shape} and {entry.dtype} does not fit {entry.size_bytes}"
            f" bytes: {error}"
        ) from error


def layout(specs: Iterable[TensorSpec]) -> tuple[list[TensorEntry], int]:
    """Arrange tensors one after another; returns the entries and the size of the whole block."""
    offset = _ALIGN
    entries = []
    for name, dtype, shape, size_bytes in specs:
        entry = TensorEntry(
            name=name, dtype=dtype, shape=list(shape), offset=offset, size_bytes=size_bytes
        )
        entries.append(entry)
        offset += -(-size_bytes // _ALIGN) * _ALIGN
    return entries, offset


def checksum(data: Bytes) -> int:
    """Sum of the 64-bit words modulo 2^64, the last one filled up with zeros.

    As fast as memory, and enough to detect a torn or partial copy.
    """
    # torch takes no read-only memory, as that of a file.
    writeable = data if data.flags.writeable else data.copy()
    return int(word_sum(torch.from_numpy(writeable))) % 2**64


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's part of the checksum of a block, int64 [] on its device: the sum of its
    64-bit words modulo 2^64, the last one filled up with zeros as in the block.
    """
    flat = tensor_bytes(tensor)
    num_missing = -flat.numel() % 8
    # Padding copies the whole tensor, also by nothing, as a part of a tensor needs that does not
    # begin at a word.
    if num_missing or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, num_missing))
    return flat.view(torch.int64).sum()


def summed(tensors: Iterable[torch.Tensor], sums: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors, and add the sum of each to `sums`."""
    for tensor in tensors:
        sums.append(word_sum(tensor))
        yield tensor


def require_checksum(manifest: Manifest, actual: int, source: str) -> None:
    """Raise WeightsError unless the bytes from the source have the manifest's checksum."""
    if actual != manifest.checksum:
        raise WeightsError(
            f"checksum of version {manifest.version} {source} is {actual}, announced"
            f" {manifest.checksum}"
        )


class SharedTensors(Closing):
    """The writer of one block.

    content: uint8 [size of the block], the header included; valid until `close`.
    """

    def __init__(self, specs: Iterable[TensorSpec], cuda: Any = None) -> None:
        """Raises WeightsError if there is too little memory.

        cuda: torch.cuda, where tensors come from a GPU: the block is page-locked, so that copies
        from and to it have the full rate of the bus, unless CUDA refuses. None = ordinary memory.
        """
        self._entries, self._total_bytes = layout(specs)
        # CLOEXEC: a child that inherited the descriptor would keep the memory of a dead learner.
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)  # /proc names it, and its first mode is 777
        try:
            os.ftruncate(self._fd, self._total_bytes)
            self._map = mmap.mmap(self._fd, self._total_bytes)
            self.content = torch.frombuffer(self._map, dtype=torch.uint8)
            # Touch every page now: the first touch is ten times slower than a later write, and
            # page-locking without it takes twice as long as both (measured on an H200).
            self.content.zero_()
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(
                f"cannot share {self._total_bytes} bytes of weights ({error}); free memory or"
                " raise the limit"
            ) from error
        self._cuda = cuda
        if cuda is not None:
            code = cuda.cudart().cudaHostRegister(self.content.data_ptr(), self._total_bytes, 0)
            if int(code):
                _log.warning(
                    "CUDA does not page-lock %d bytes of weights (error %d): pushes are slower",
                    self._total_bytes,
                    int(code),
                )
                self._cuda = None
        self._writes = 0

    def write(
        self, version: int, tensors: Iterable[torch.Tensor], sums: Sequence[torch.Tensor] = ()
    ) -> Manifest:
        """Copy the tensors, in the order of the specs, and describe the result. Raises WeightsError
        if the size of a tensor is not the announced one.

        sums: of the tensors where they come from (`summed`); the checksum then covers the way into
        the block, and training does not wait for it. Without them the block is added up.
        """
        self._begin(version)
        for entry, data in zip(self._entries, map(tensor_bytes, tensors), strict=True):
            if data.numel() != entry.size_bytes:
                raise WeightsError(
                    f"{entry.name} has {data.numel()} bytes, {entry.size_bytes} were announced"
                )
            target = self.content[entry.offset : entry.offset + entry.size_bytes]
            target.copy_(data, non_blocking=self._cuda is not None)
        if self._cuda is not None:
            self._cuda.synchronize()
        # Not before the loop, which computes them.
        return self._complete(version, int(torch.stack(list(sums)).sum()) if sums else None)

    def change(self, version: int, base: int, changes: Changes) -> Manifest:
        """Turn version `base` into `version`. Raises BaseMissing unless the block has `base`."""
        _, present, counter = _HEADER.unpack_from(self._map)
        if present != base or counter == 0 or counter % 2:
            raise BaseMissing(
                f"changes from version {base} to {version} do not fit a block with version"
                f" {present}, write {counter}"
            )
        self._begin(version)
        changes.apply(self.content[_ALIGN:].numpy().view(np.uint16))
        return self._complete(version)

    def _begin(self, version: int) -> None:
        self._writes += 1
        # An odd counter until the version is complete: a reader then refuses the block.
        self._put_header(version, 2 * self._writes - 1)

    def _complete(self, version: int, total: int | None = None) -> Manifest:
        self._put_header(version, 2 * self._writes)
        return Manifest(
            version=version,
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            tensors=self._entries,
            total_bytes=self._total_bytes,
            checksum=(int(word_sum(self.content[_ALIGN:])) if total is None else total) % 2**64,
        )

    def _put_header(self, version: int, counter: int) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, version, counter)

    def close(self) -> None:
        """Free the memory as soon as no reader maps it."""
        if self._cuda is not None:
            self._cuda.cudart().cudaHostUnregister(self.content.data_ptr())
        del self.content
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


class SharedTensorsReader(Closing):
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
        self.block: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        """The whole block, header included."""
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
        require_checksum(self._manifest, checksum(self.block[_ALIGN:]), "in its block")

    def verify_unchanged(self) -> None:
        """Raise WeightsError if the writer has started another version: tensors may be torn."""
        if self._read_counter() != self._counter:
            raise WeightsError(
                f"version {self._manifest.version} was overwritten while it was read"
            )

    def tensors(self) -> Iterator[tuple[TensorEntry, Bytes]]:
        """Yield each entry with its bytes, a view of the block that is valid until `close`."""
        for entry in self._manifest.tensors:
            yield entry, self.block[entry.offset : entry.offset + entry.size_bytes]

    @property
    def words(self) -> Words:
        """The tensors and their padding, without the header."""
        return self.block[_ALIGN:].view(np.uint16)

    def close(self) -> None:
        """Unmap the block. While views of it exist, they keep it mapped."""
        del self.block
        with contextlib.suppress(BufferError):
            self._map.close()


def tensor_views(reader: SharedTensorsReader) -> Tensors:
    """Yield each tensor with its name, valid until the reader is closed; raises WeightsError."""
    for entry, data in reader.tensors():
        yield entry.name, tensor_of(entry, torch.from_numpy(data))


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
            return os.open(manifest.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise BlockUnreachable(
            f"weights of version {manifest.version} cannot be mapped from {manifest.path}: {error}"
        ) from error
    raise BlockUnreachable(
        f"weights of version {manifest.version}: {manifest.path} is {target}, not a block of"
        " weights"
    )
