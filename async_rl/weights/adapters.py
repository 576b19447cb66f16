"""An adapter as a value: the products that it adds to weights, its file, and the model's directory
that has those weights.

W + scaling * B A has the same bits on every device. A float32 product depends on the order of its
sums, which differs between devices and numbers of threads. So B and A are rounded to integers of 22
bits relative to the largest number of a row of B and of a column of A. Sums of 512 products of such
integers have at most 53 bits, and float64 holds every sum exactly, in any order. The few operations
after the product round as IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from async_rl.core.errors import BaseMissing
from async_rl.core.frozen import frozen
from async_rl.protocol.weights import Manifest
from async_rl.weights.block import dtype_of, tensor_bytes
from async_rl.weights.changes import Bytes

_BITS = 22
_PIECE = 1 << 18
"""Numbers merged at a time: float64 copies of them fit the cache of a core."""
_DOWN = "lora_A.weight"
_UP = "lora_B.weight"
_PREFIX = "base_model.model."


@frozen
class Adapter:
    """One version of an adapter. tensors: whole, float32, with the names of PEFT's files."""

    tensors: Mapping[str, Tensor]
    scaling: float

    @classmethod
    def from_bytes(cls, content: bytes, scaling: float) -> Adapter:
        """Read the file of `to_bytes`. Raises BaseMissing if it is damaged."""
        try:
            return cls(tensors=load(content), scaling=scaling)
        except SafetensorError as error:
            raise BaseMissing(f"the file of an adapter is damaged: {error}") from error

    def to_bytes(self, version: int) -> bytes:
        """Return a safetensors file with the tensors."""
        content: bytes = save(dict(self.tensors), {"version": str(version)})
        return content

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the named weight in float32, with its product added if it has one.

        weight: of the base, any float type.
        """
        weight = weight.float()
        if not self.changes(name):
            return weight
        layer = _layer(name)
        return merge(weight, self.tensors[layer + _UP], self.tensors[layer + _DOWN], self.scaling)

    def changes(self, name: str) -> bool:
        """Return whether the named weight has a product."""
        return _layer(name) + _DOWN in self.tensors


def _layer(name: str) -> str:
    return _PREFIX + name.removesuffix("weight")


def merge(weight: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """Float32 [M, N] + scaling * float32 [M, R] @ float32 [R, N] -> float32 [M, N], R <= 512.

    Equal bits on every device, and for any division of the rows. arXiv 2106.09685 eq. 3.
    """
    down, columns = _integers(down, dim=0)
    up, rows = _integers(up, dim=1)
    result = torch.empty_like(weight)
    size = max(1, _PIECE // max(1, weight.shape[1]))
    for begin in range(0, weight.shape[0], size):
        piece = slice(begin, begin + size)
        # Multiplied by powers of 2, then rounded twice. Never one operation for product and sum:
        # some devices would round once.
        product = up[piece] @ down
        product *= rows[piece]
        product *= columns
        product *= scaling
        product += weight[piece]
        result[piece] = product
    return result


def _integers(x: Tensor, *, dim: int) -> tuple[Tensor, Tensor]:
    """Float32 -> float64 integers of at most 2^22, and the power of 2 that restores them."""
    largest = x.abs().amax(dim, keepdim=True)
    # |x| < 2^exponent. torch.ldexp computes 2^n by `pow`, which need not be exact.
    shift = torch.frexp(largest).exponent.long() - _BITS
    # The bits of a float64 without mantissa: the exponent, with its bias of 1023, above 52 bits.
    unit = ((shift + 1023) << 52).view(torch.float64)
    return (x.double() / unit).round(), unit


class BaseWeights:
    """The safetensors files of a model's directory.

    Each push reads the weights again, one tensor at a time: the kernel caches the files in memory
    that it can reclaim, while a copy in this process would occupy a second model's memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, Path] = {}

    def tensors(
        self, manifest: Manifest, adapter: Adapter, *, only_changed: bool
    ) -> Iterator[Bytes | None]:
        """Yield the tensors of the manifest that base and adapter make together, as bytes; with
        `only_changed` None in place of each tensor that the adapter does not change.

        Raises BaseMissing if the directory does not have a tensor under the manifest's name and in
        its shape.
        """
        for entry in manifest.tensors:
            if only_changed and not adapter.changes(entry.name):
                yield None
                continue
            weight = self._read(entry.name)
            if list(weight.shape) != entry.shape:
                raise BaseMissing(
                    f"{entry.name} has shape {list(weight.shape)} in {self._path}, the learner has"
                    f" {entry.shape}"
                )
            yield tensor_bytes(adapter.merged(entry.name, weight).to(dtype_of(entry)))

    def _read(self, name: str) -> Tensor:
        try:
            if not self._files:
                for file in sorted(self._path.glob("*.safetensors")):
                    with safe_open(file, framework="pt") as weights:
                        self._files.update(dict.fromkeys(weights.keys(), file))
            # Opened for each tensor: pages of an open file count as memory of this process.
            with safe_open(self._files[name], framework="pt") as weights:
                tensor: Tensor = weights.get_tensor(name)
        except (SafetensorError, OSError, KeyError) as error:
            raise BaseMissing(f"{self._path} has no base weights {name}: {error!r}") from error
        return tensor
