"""Sums over the trained tokens of each sequence, given back to every one of its tokens.

Used wherever a formula is about a sequence (its ratio, its weight) while everything else is per
token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Which tokens belong together: index int64 [R] in 0..count-1; mask bool [R], the tokens that
    enter a sum.
    """

    index: Tensor
    count: int
    mask: Tensor

    def total(self, x: Tensor) -> Tensor:
        """Sum of x over the masked tokens of each token's sequence: float32 [R] -> float32 [R]."""
        sums = x.new_zeros(self.count).index_add_(0, self.index, torch.where(self.mask, x, 0.0))
        return sums[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """Mean of x over the masked tokens of each token's sequence, 0 where there is none: float32
        [R] -> float32 [R].
        """
        return self.total(x) / self.total(torch.ones_like(x)).clamp(min=1)
