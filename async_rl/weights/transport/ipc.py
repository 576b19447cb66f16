"""The learner's side of weights.transfer=ipc: a version in one buffer of the GPU, which generators
on that GPU map.

Invariant: the buffer lives until every generator that was to read it has answered; then `close`
gives its memory back. Called by rank 0 of the learner. `ExportedWeights` needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from async_rl.protocol.weights import DeviceBlock


class ExportedWeights:
    """One version, packed."""

    def __init__(
        self, tensors: Iterable[torch.Tensor], *, size_bytes: int, device: torch.device
    ) -> None:
        """As `pack`."""
        self._packed = pack(tensors, size_bytes=size_bytes, device=device)
        torch.cuda.current_stream(device).synchronize()
        _, arguments = reduce_tensor(self._packed)  # type: ignore[no-untyped-call]
        self.block = described(
            arguments, gpu=str(torch.cuda.get_device_properties(device).uuid), size_bytes=size_bytes
        )

    def close(self) -> None:
        """Nobody maps it any more."""
        del self._packed
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def pack(tensors: Iterable[torch.Tensor], *, size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [size_bytes] with the bytes of all tensors (so many together), one behind the other;
    each is let go of before the next.
    """
    packed = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    offset = 0
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        packed[offset : offset + flat.numel()].copy_(flat)
        offset += flat.numel()
    return packed


def described(arguments: tuple[Any, ...], *, gpu: str, size_bytes: int) -> DeviceBlock:
    """What of torch's arguments for mapping a uint8 buffer [size_bytes] its reader cannot know by
    itself.
    """
    (
        _,
        _,
        _,
        offset,
        _,
        _,
        _,
        handle,
        storage_size,
        storage_offset,
        _,
        counter_handle,
        counter_offset,
        event_handle,
        event_sync,
    ) = arguments
    return DeviceBlock(
        gpu=gpu,
        size_bytes=size_bytes,
        offset=offset,
        handle=handle,
        storage_size_bytes=storage_size,
        storage_offset_bytes=storage_offset,
        ref_counter_handle=counter_handle,
        ref_counter_offset=counter_offset,
        event_handle=event_handle,
        event_sync_required=event_sync,
    )
