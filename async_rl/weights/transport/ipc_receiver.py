"""What vLLM's ipc form of a weight transfer is told of a version in memory of the GPU. Used by
vllm_worker.py.
"""

from __future__ import annotations

from typing import Any

import torch

from async_rl.protocol.weights import DeviceBlock, Manifest


def consumer_arguments(manifest: Manifest, block: DeviceBlock) -> dict[str, Any]:
    """Arguments of vLLM's `packed_ipc_consumer`, but for the device's index: one chunk with all
    tensors.
    """
    return {
        "ipc_handle": {block.gpu: mapping_arguments(block)},
        "names": [tensor.name for tensor in manifest.tensors],
        "shapes": [list(tensor.shape) for tensor in manifest.tensors],
        "dtype_names": [tensor.dtype for tensor in manifest.tensors],
        "tensor_sizes": [tensor.size_bytes for tensor in manifest.tensors],
    }


def mapping_arguments(block: DeviceBlock) -> tuple[Any, ...]:
    """Arguments of torch's `rebuild_cuda_tensor` for a uint8 tensor [size_bytes]; vLLM puts its own
    device in the place of 0.
    """
    return (
        torch.Tensor,
        torch.Size([block.size_bytes]),
        (1,),
        block.offset,
        torch.storage.TypedStorage,
        torch.uint8,
        0,
        block.handle,
        block.storage_size_bytes,
        block.storage_offset_bytes,
        False,
        block.ref_counter_handle,
        block.ref_counter_offset,
        block.event_handle,
        block.event_sync_required,
    )
