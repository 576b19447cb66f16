"""Cut the block of a version into buckets for a broadcast: whole tensors, as many as fit a buffer.

A bucket is a contiguous part of the block as `shared_memory.layout` arranges it, so the learner
sends from the block itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from async_rl.core.errors import WeightsError
from async_rl.core.frozen import frozen
from async_rl.protocol.weights import Manifest, TensorEntry

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@frozen
class Bucket:
    """The bytes of the block from `start` to `end`, and the tensors in it."""

    begin: int
    end: int
    entries: Sequence[TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Size, including the padding after each tensor."""
        return self.end - self.begin

    def tensors(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """flat: uint8 [size_bytes] -> each tensor with its name, a view."""
        for entry in self.entries:
            begin = entry.offset - self.begin
            yield entry.name, tensor_of(entry, flat[begin : begin + entry.size_bytes])


def tensor_of(entry: TensorEntry, flat: torch.Tensor) -> torch.Tensor:
    """uint8 [size_bytes] -> a view of the entry's dtype and shape. Raises WeightsError if they do
    not fit.
    """
    dtype = dtype_of(entry)
    try:
        return flat.view(dtype).reshape(entry.shape)
    except RuntimeError as error:
        raise WeightsError(
            f"{entry.name} of shape {entry.shape} and {entry.dtype} does not fit {entry.size_bytes}"
            f" bytes: {error}"
        ) from error


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the entry's dtype. Raises WeightsError for one that no medium carries."""
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightsError(
            f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}"
        )
    return dtype


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Return the buckets in the order of the block.

    A bucket above bucket_bytes has a single tensor, which is larger than that.
    """
    entries = manifest.tensors
    ends = [*(entry.offset for entry in entries[1:]), manifest.total_bytes]
    result: list[Bucket] = []
    first = 0
    for index in range(1, len(entries) + 1):
        begin = entries[first].offset
        # A tensor is never divided: the receiver passes whole tensors to the engine.
        if index == len(entries) or ends[index] - begin > bucket_bytes:
            result.append(Bucket(begin=begin, end=ends[index - 1], entries=entries[first:index]))
            first = index
    return result


def bucket_checksum(flat: torch.Tensor) -> int:
    """uint8 [N], N a multiple of 8, on any device -> its part of the manifest's checksum: the sum
    of its 64-bit words modulo 2^64.
    """
    return int(flat.view(torch.int64).sum()) % 2**64
