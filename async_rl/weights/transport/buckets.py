"""A version's block cut into pieces for a broadcast: whole tensors, as many as fit into a buffer.

A piece is a stretch of the block as `shared_tensors.py` lays it out, so the learner sends from the
block itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest, TensorEntry

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The bytes of the block from `begin` to `end`, and the tensors in it."""

    begin: int
    end: int
    entries: Sequence[TensorEntry]

    @property
    def size_bytes(self) -> int:
        """The fill bytes behind each tensor included."""
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
    if (dtype := _DTYPES.get(entry.dtype)) is None:
        raise WeightsError(
            f"{entry.name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}"
        )
    try:
        return flat.view(dtype).reshape(entry.shape)
    except RuntimeError as error:
        raise WeightsError(
            f"{entry.name} of shape {entry.shape} and {entry.dtype} does not fit {entry.size_bytes}"
            f" bytes: {error}"
        ) from error


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """In the order of the block. One above bucket_bytes holds a single tensor, which is larger than
    that.
    """
    entries = manifest.tensors
    ends = [*(entry.offset for entry in entries[1:]), manifest.total_bytes]
    found: list[Bucket] = []
    first = 0
    for index in range(1, len(entries) + 1):
        if index == len(entries) or ends[index] - entries[first].offset > bucket_bytes:
            found.append(
                Bucket(
                    begin=entries[first].offset, end=ends[index - 1], entries=entries[first:index]
                )
            )
            first = index
    return found


def bucket_checksum(flat: torch.Tensor) -> int:
    """uint8 [N], N a multiple of 8 -> its part of the manifest's checksum, on whatever device it
    is: the sum of its 64-bit words.
    """
    return int(flat.view(torch.int64).sum()) % 2**64
