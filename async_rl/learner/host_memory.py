"""Copies of tensors from a GPU into page-locked main memory while something else is computed.

A copy into ordinary memory blocks until the GPU has done all earlier work. A copy into page-locked
memory does not block, and has the full rate of the bus. Two buffers suffice: one is used while the
other one is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from async_rl.learner.sharding import one_ahead


class HostCopies:
    """Two buffers in page-locked memory, allocated at the first use and kept.

    largest_bytes: size of the largest tensor. Without a GPU the memory is ordinary, and every copy
    is complete immediately.
    """

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._buffers: list[Tensor] = []

    def copy(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield a copy of each tensor, which is valid until the next one is requested."""
        # The reader of a buffer has requested a later tensor, so it has finished.
        begun = (_Copy(tensor, self._buffer(i % 2)) for i, tensor in enumerate(tensors))
        yield from map(_Copy.result, one_ahead(begun))

    def _buffer(self, index: int) -> Tensor:
        # Ranks that only send their parts never come here.
        if index == len(self._buffers):
            self._buffers.append(
                torch.empty(
                    self._largest_bytes,
                    dtype=torch.uint8,
                    pin_memory=torch.cuda.is_available(),
                )
            )
        return self._buffers[index]


class _Copy:
    """One copy that may still be under way. It keeps the tensor that it reads."""

    def __init__(self, tensor: Tensor, buffer: Tensor) -> None:
        self._tensor = tensor
        size = tensor.numel() * tensor.element_size()
        self._target = buffer[:size].view(tensor.dtype).view(tensor.shape)
        self._target.copy_(tensor, non_blocking=True)
        self._done = torch.get_device_module(tensor.device).Event()
        self._done.record()

    def result(self) -> Tensor:
        """Return the complete copy."""
        self._done.synchronize()
        return self._target
