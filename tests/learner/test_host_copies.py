"""Copies of a device's tensors for a push: equal bits, two buffers, and one copy ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from async_rl.learner.host_memory import HostCopies

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


def tensors(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (), (40, 5), (1,), (13,), (2, 3, 4)]
    dtypes = [torch.float32, torch.bfloat16]
    return [
        torch.randn(shape, generator=generator).to(dtypes[i % 2]).to(device)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_every_copy_has_the_bits_of_its_tensor(device: str) -> None:
    given = tensors(device)
    copies = HostCopies(max(t.nbytes for t in given))
    for _ in range(2):
        found = [copy.clone() for copy in copies.copy(iter(given))]
        assert len(found) == len(given)
        for tensor, copy in zip(given, found, strict=True):
            assert copy.device.type == "cpu"
            assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(copy, tensor.cpu())
    assert list(copies.copy(iter([]))) == []


@pytest.mark.parametrize("device", DEVICES)
def test_two_buffers_hold_all_copies_and_are_kept(device: str) -> None:
    given = tensors(device)
    copies = HostCopies(max(t.nbytes for t in given))
    addresses = {copy.data_ptr() for _ in range(2) for copy in copies.copy(iter(given))}
    assert len(addresses) == 2
    if device == "cuda":
        assert all(copy.is_pinned() for copy in copies.copy(iter(given)))


def test_a_copy_begins_before_the_one_before_it_is_read() -> None:
    given = tensors("cpu")
    taken: list[int] = []

    def gathered() -> Iterator[Tensor]:
        for number, tensor in enumerate(given):
            taken.append(number)
            yield tensor

    copies = HostCopies(max(t.nbytes for t in given)).copy(gathered())
    for number, copy in enumerate(copies):
        # The next one is on its way, and no other may be: there are two buffers.
        assert taken[-1] == min(number + 1, len(given) - 1)
        assert torch.equal(copy, given[number])


def test_a_copy_is_not_the_tensor_itself() -> None:
    """The next step changes the weights while the block is read."""
    given = tensors("cpu")
    before = [t.clone() for t in given]
    found = []
    for copy in HostCopies(max(t.nbytes for t in given)).copy(iter(given)):
        for tensor in given[: len(found) + 1]:
            tensor.zero_()
        found.append(copy.clone())
    for copy, expected in zip(found, before, strict=True):
        assert torch.equal(copy, expected)
