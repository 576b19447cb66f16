"""What the learner writes is what a generator reads, for every dtype, without a copy on the way."""

from __future__ import annotations

import pytest
import torch

from async_rl.core.errors import WeightsError
from async_rl.weights.block import (
    SharedTensors,
    SharedTensorsReader,
    tensor_bytes,
    tensor_spec,
    tensor_views,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
    "d": torch.arange(6.0).reshape(2, 3).t(),
}


def publisher() -> SharedTensors:
    return SharedTensors([tensor_spec(name, tensor) for name, tensor in TENSORS.items()])


def test_a_reader_sees_the_tensors_that_were_written() -> None:
    with publisher() as weights:
        manifest = weights.write(4, TENSORS.values())
        with SharedTensorsReader(manifest) as reader:
            reader.verify()
            found = {name: view.clone() for name, view in tensor_views(reader)}
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_next_version_reuses_the_block() -> None:
    with publisher() as weights:
        first = weights.write(1, TENSORS.values())
        second = weights.write(2, [tensor + 1 for tensor in TENSORS.values()])
        assert first.path == second.path
        assert first.checksum != second.checksum
        with pytest.raises(WeightsError, match="not a complete version 1"):
            SharedTensorsReader(first)


def test_bytes_of_a_contiguous_tensor_are_a_view_of_it() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    seen = tensor_bytes(tensor)
    tensor[1] = 1.0
    assert seen.tolist() == [0, 0, 0x80, 0x3F, 0, 0]


def test_a_reader_cannot_change_the_block() -> None:
    with publisher() as weights:
        manifest = weights.write(1, TENSORS.values())
        with SharedTensorsReader(manifest) as reader:
            next(iter(tensor_views(reader)))[1].fill_(9.0)
        with SharedTensorsReader(manifest) as reader:
            reader.verify()


def test_a_tensor_of_another_dtype_is_refused() -> None:
    with (
        publisher() as weights,
        pytest.raises(WeightsError, match="a has 48 bytes, 24 were announced"),
    ):
        weights.write(1, [tensor.double() for tensor in TENSORS.values()])


def test_a_tensor_of_another_size_is_refused_and_the_block_stays_incomplete() -> None:
    with publisher() as weights:
        manifest = weights.write(1, TENSORS.values())
        with pytest.raises(WeightsError, match="has 12 bytes, 24 were announced"):
            weights.write(
                2, [tensor[:1] if tensor.dim() == 2 else tensor for tensor in TENSORS.values()]
            )
        with pytest.raises(WeightsError, match="not a complete version 1"):
            SharedTensorsReader(manifest)
