"""W + scaling * B A, with the same bits on every device.

A float32 product depends on the order of its sums, which differs between devices and numbers of
threads. Here B and A are rounded to integers of 22 bits relative to the largest number of a row of
B and of a column of A. Sums of 512 products of such integers have at most 53 bits, so float64
holds every one exactly, in any order. The few operations after the product round as IEEE 754 says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from async_rl.core.frozen import frozen

_BITS = 22
_PIECE = 1 << 18
"""Numbers merged at a time: float64 copies of them fit the cache of a core."""
_DOWN, _UP = "lora_A.weight", "lora_B.weight"
_PREFIX = "base_model.model."


@frozen
class Adapter:
    """One version of an adapter. tensors: whole, float32, with the names of PEFT's files."""

    tensors: Mapping[str, Tensor]
    scaling: float

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
    unit = ((shift + 1023) << 52).view(torch.float64)
    return (x.double() / unit).round(), unit
