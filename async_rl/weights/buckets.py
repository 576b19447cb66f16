"""The buckets of a broadcast: contiguous parts of the block as `block.layout` arranges it.

Each has whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from async_rl.config.run import PIECE_BYTES
from async_rl.core.dividing import divided
from async_rl.core.frozen import frozen
from async_rl.protocol.weights import Manifest, TensorEntry
from async_rl.weights.block import Tensors, tensor_of

BUCKET_BYTES = {"gloo": 64 << 20, "nccl": PIECE_BYTES}
"""Largest piece. Large enough that the latency of a call does not count: main memory sends about 2
GB/s, a GPU 25 and more.
"""


@frozen
class Bucket:
    """A contiguous part of the block, [begin, end) in bytes, and the tensors in it."""

    begin: int
    end: int
    entries: Sequence[TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Size, including the padding after each tensor."""
        return self.end - self.begin

    def tensors(self, flat: torch.Tensor) -> Tensors:
        """flat: uint8 [size_bytes] -> each tensor with its name, a view."""
        for entry in self.entries:
            begin = entry.offset - self.begin
            yield entry.name, tensor_of(entry, flat[begin : begin + entry.size_bytes])


def buckets(manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
    """Return the buckets in the order of the block.

    A bucket above bucket_bytes has a single tensor, which is larger than that.
    """
    ends = [*(entry.offset for entry in manifest.tensors[1:]), manifest.total_bytes]
    placed = zip(manifest.tensors, ends, strict=True)
    # A tensor is never divided: the receiver passes whole tensors to the engine.
    parts = divided((((entry, end), end - entry.offset) for entry, end in placed), bucket_bytes)
    return [
        Bucket(begin=part[0][0].offset, end=part[-1][1], entries=[entry for entry, _ in part])
        for part in parts
    ]
