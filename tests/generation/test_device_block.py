"""Facts about a version in memory of a GPU that need no GPU: what is told of it, and what vLLM's
own code makes of that.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from generation_support import make_model, run_scenario
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from async_rl.core.codec import decode, encode
from async_rl.protocol.weights import DeviceBlock
from async_rl.weights.ipc import described, mapping_arguments


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
    block = described(tuple(given.values()), gpu="GPU-1", size_bytes=96)
    assert mapping_arguments(decode(encode(block), DeviceBlock)) == tuple(given.values())


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
