"""Facts about a version in memory of a GPU that need no GPU: what is told of it, and what vLLM's
own code makes of that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_support import make_model, run_scenario
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from async_rl.core.codec import decode, encode
from async_rl.protocol.weights import DeviceChunk
from async_rl.weights.ipc import described, mapping_arguments, packed


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


@pytest.mark.slow
def test_vllm_takes_the_tensors_from_the_block_and_sleeps_only_where_a_device_is_shared(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    make_model(model, is_tied=True)
    said = run_scenario("device_block_scenario.py", model, out=tmp_path / "said.json")
    assert said["asks_torch_for_the_block"]
    assert said["loads_the_tensors"]
    devices = said["devices"]
    assert devices["cpu"][0] is False
    # vLLM refuses a GPU of which less than the share is free, whatever the cache.
    assert devices["handed over"] == [True, 0.001, 99 << 20]
    assert devices["shared"] == [False, 0.001, 99 << 20]
    assert devices["shared, cache measured"] == [False, 0.4, None]
