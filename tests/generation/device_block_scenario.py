"""What vLLM makes of a version in memory of a GPU, with the mapping and the GPU played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from async_rl.core.codec import encode
from async_rl.generation.vllm.worker import SharedWeightsExtension, _decoded
from async_rl.protocol.weights import DeviceBlock, DeviceChunk, Manifest, TensorEntry
from async_rl.weights.ipc import mapping_arguments, packed
from async_rl.weights.routes import Receivers


def main() -> dict[str, Any]:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor([7.0, 8.0], dtype=torch.bfloat16),
    }
    sizes = [tensor.nbytes for tensor in tensors.values()]
    chunks = packed(tensors.values(), sizes=sizes, device=torch.device("cpu"), chunk_bytes=12)
    buffers = [buffer for _, buffer in chunks]
    entries = [
        TensorEntry(
            name=n, dtype="bfloat16", shape=list(t.shape), offset=64, size_bytes=2 * t.numel()
        )
        for n, t in tensors.items()
    ]
    manifest = Manifest(version=3, path="", tensors=entries, total_bytes=0, checksum=0)
    described = [
        DeviceChunk(
            num_tensors=1,
            size_bytes=len(buffer),
            offset=0,
            storage=(b"h", 16, 512),
            sync=(b"r", 1, b"e", True),
        )
        for buffer in buffers
    ]
    block = DeviceBlock(gpu="GPU-1", chunks=described)
    asked: list[tuple[Any, ...]] = []

    def mapped(*arguments: Any) -> torch.Tensor:
        asked.append(arguments)
        return buffers[len(asked) - 1]

    reductions.rebuild_cuda_tensor = mapped
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid="GPU-1")  # type: ignore[assignment,misc,return-value]
    worker: Any = SharedWeightsExtension()
    worker._receivers = Receivers(0, torch.device("cuda", 5))
    given = _decoded(encode(manifest), encode(block))
    with worker._receivers.receive(*given) as tensors_found:
        loaded = list(tensors_found)
    expected = [list(mapping_arguments(chunk)) for chunk in described]
    for arguments in expected:
        arguments[6] = 5
    return {
        "asks_torch_for_the_block": [list(arguments) for arguments in asked] == expected,
        "loads_the_tensors": (
            [(name, tensor.tolist()) for name, tensor in loaded]
            == [(n, t.tolist()) for n, t in tensors.items()]
        ),
    }
