"""The learner's side of a push: all tensors of a version in one block that generators of this host
map.

Invariant: the block is reused; a version may be written only when no generator still reads the one
before (after `push` returned). Called by rank 0 of the learner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest
from async_rl.weights.transport.shared_memory import SharedTensors, layout

TensorSpec = tuple[str, str, Sequence[int], int]
"""Hugging Face name, torch dtype name, shape, size in bytes."""


class WeightPublisher:
    """One shared block, sized at the start and written once per version."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Raises WeightsError if the memory is not there."""
        self._dtypes = [dtype for _, dtype, _, _ in specs]
        self._shared = SharedTensors(*layout(specs))

    def write(self, version: int, tensors: Iterable[torch.Tensor]) -> Manifest:
        """Copies the tensors, in the order of the specs. Raises WeightsError if one does not fit
        its spec.
        """
        return self._shared.write(version, self._checked(tensors))

    def _checked(self, tensors: Iterable[torch.Tensor]) -> Iterator[npt.NDArray[np.uint8]]:
        for index, tensor in enumerate(tensors):
            found = str(tensor.dtype).removeprefix("torch.")
            if index < len(self._dtypes) and found != self._dtypes[index]:
                raise WeightsError(
                    f"tensor {index} has dtype {found}, {self._dtypes[index]} was announced"
                )
            yield tensor_bytes(tensor)

    def close(self) -> None:
        """Gives the memory back as soon as no generator maps it."""
        self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tensor_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor of any dtype: a view of it where it is contiguous and in main memory."""
    flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
    array: npt.NDArray[np.uint8] = flat.numpy()
    return array


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What the publisher must know of a tensor beforehand."""
    return (
        name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tensor.numel() * tensor.element_size(),
    )
