"""Facts about a version in memory of a GPU that need no GPU: what is told of it, and what vLLM's
own code makes of that.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generation_support import run_scenario
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from async_rl.core.codec import decode, encode
from async_rl.protocol.weights import DeviceChunk, Manifest
from async_rl.weights.ipc import (
    ExportedWeights,
    described,
    mapping_arguments,
    packed,
    receive_from_device,
)
from async_rl.weights.tensors import layout, tensor_spec


def test_the_reader_maps_with_the_arguments_that_torch_gave_the_writer() -> None:
    given: dict[str, Any] = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([96]),
        "tensor_stride": (1,),
        "tensor_offset": 2,
        "storage_cls": type(torch.empty(0, dtype=torch.uint8)._typed_storage()),
        "dtype": torch.uint8,
        "storage_device": 0,
        "storage_handle": b"handle",
        "storage_size_bytes": 98,
        "storage_offset_bytes": 512,
        "requires_grad": False,
        "ref_counter_handle": b"counter",
        "ref_counter_offset": 3,
        "event_handle": b"event",
        "event_sync_required": True,
    }
    assert list(given) == list(inspect.signature(rebuild_cuda_tensor).parameters), (
        "torch has changed what it wants"
    )
    chunk = described(tuple(given.values()), num_tensors=1, size_bytes=96)
    assert mapping_arguments(decode(encode(chunk), DeviceChunk)) == tuple(given.values())


def test_a_version_is_packed_into_chunks_of_bounded_size_and_one_of_a_larger_tensor() -> None:
    released: list[int] = []
    sizes = [40, 60, 32, 200, 8]

    def tensors() -> Iterator[torch.Tensor]:
        for number, size in enumerate(sizes):
            yield torch.full((size // 4,), number, dtype=torch.float32)
            released.append(number)

    cpu = torch.device("cpu")
    chunks = packed(tensors(), sizes=sizes, device=cpu, chunk_bytes=100)
    first = next(chunks)
    assert released == [0], "no further tensor is gathered before there is room for it"
    found = [first, *chunks]
    assert [(count, len(buffer)) for count, buffer in found] == [
        (2, 100),
        (1, 32),
        (1, 200),
        (1, 8),
    ]
    values = torch.cat([buffer for _, buffer in found]).view(torch.float32)
    assert values.tolist() == [0.0] * 10 + [1.0] * 15 + [2.0] * 8 + [3.0] * 50 + [4.0] * 2


def test_a_version_is_exported_once_its_bytes_are_complete_and_freed_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA and vLLM played: the memory is that of this process."""
    did: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *_: did.append(name)

    def reduced(buffer: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        did.append("reduce")
        return None, (None, None, None, 2, None, None, 0, *"abc", False, *"de", True)

    def consume(handles: Any, names: Any, shapes: Any, dtypes: Any, sizes: Any, index: int) -> Any:
        did.append((*handles, names, shapes, dtypes, sizes, index))
        return ((name, torch.ones(1)) for name in names)

    stream = SimpleNamespace(synchronize=noted("complete"))
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "ipc_collect", noted("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", noted("empty"))
    monkeypatch.setattr("async_rl.weights.ipc.reduce_tensor", reduced)
    module: Any = SimpleNamespace(packed_ipc_consumer=consume)
    name = "vllm.distributed.weight_transfer.packed_tensor"
    monkeypatch.setitem(sys.modules, name, module)
    sizes = [12, 8]
    cpu = torch.device("cpu")
    exported = ExportedWeights([torch.ones(3), torch.ones(2)], sizes=sizes, device=cpu)
    assert did == ["complete", "reduce"]
    [chunk] = exported.block.chunks
    assert (exported.block.gpu, chunk.num_tensors, chunk.size_bytes) == ("GPU-1", 2, 20)
    entries, total = layout([tensor_spec("a", torch.empty(3)), tensor_spec("b", torch.empty(2))])
    manifest = Manifest(version=1, path="", tensors=entries, total_bytes=total, checksum=0)
    with receive_from_device(manifest, exported.block, torch.device("cuda", 7)) as tensors:
        assert [name for name, _ in tensors] == ["a", "b"]
    shapes = [[3], [2]]
    assert did.pop() == ("GPU-1", ["a", "b"], shapes, ["float32"] * 2, sizes, 7)
    memory = weakref.ref(exported._packed[0][1])
    did.clear()
    exported.close()
    assert (memory(), did) == (None, ["collect", "empty"])


@pytest.mark.slow
def test_vllm_takes_the_tensors_from_the_block() -> None:
    said = run_scenario("device_block_scenario:main")
    assert said["asks_torch_for_the_block"]
    assert said["loads_the_tensors"]
