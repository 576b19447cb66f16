"""The learner's block of weights: torch tensors in, a manifest out.

Invariant: the block is reused, so a version may be written only when no generator still reads the
one before (`Membership.is_free`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import torch

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest
from async_rl.weights.transport.changes import Bytes
from async_rl.weights.transport.shared_memory import SharedTensors, layout

TensorSpec = tuple[str, str, Sequence[int], int]
"""Hugging Face name, torch dtype name, shape, size in bytes."""


class WeightPublisher:
    """One shared block, allocated once and written once per version."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Raises WeightsError if there is too little memory."""
        self._dtypes = [dtype for _, dtype, _, _ in specs]
        self._shared = SharedTensors(*layout(specs))

    def write(self, version: int, tensors: Iterable[torch.Tensor]) -> Manifest:
        """Copy the tensors, in the order of the specs. Raises WeightsError if one does not match
        its spec.
        """
        return self._shared.write(version, self._checked(tensors))

    def _checked(self, tensors: Iterable[torch.Tensor]) -> Iterator[Bytes]:
        for index, tensor in enumerate(tensors):
            dtype = _dtype_name(tensor)
            if index < len(self._dtypes) and dtype != self._dtypes[index]:
                raise WeightsError(
                    f"tensor {index} has dtype {dtype}, {self._dtypes[index]} was announced"
                )
            yield tensor_bytes(tensor)

    def close(self) -> None:
        """Free the memory as soon as no generator maps it."""
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor of any dtype: a view if it is contiguous and in main memory."""
    # As bytes: numpy has no bfloat16.
    on_cpu = tensor.detach().to("cpu").contiguous()
    flat = on_cpu.view(-1).view(torch.uint8)
    array: Bytes = flat.numpy()
    return array


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the facts that the publisher needs before the first version."""
    size_bytes = tensor.numel() * tensor.element_size()
    return name, _dtype_name(tensor), tuple(tensor.shape), size_bytes


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
