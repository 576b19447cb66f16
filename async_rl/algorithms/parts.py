"""Sums and means over parts of a batch: the members of a group, or the tokens of a sequence.

Group statistics, sequence ratios and sequence weights use the same two operations, so they share
the rule for elements that do not count.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """N elements divided into `count` parts.

    index: int64 [N], the part of each element, in 0..count-1; mask: bool [N], the elements that
    enter a sum.  An index out of range raises IndexError or RuntimeError in torch.
    """

    index: Tensor
    count: int
    mask: Tensor

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum over the counted elements of each part: float [N] -> float [count]."""
        return x.new_zeros(self.count).index_add_(0, self.index, torch.where(self.mask, x, 0.0))

    def total(self, x: Tensor) -> Tensor:
        """Return at each element the sum of its part: float [N] -> float [N]."""
        return self.sums(x)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """Return at each element the mean of its part, 0 for a part without counted elements:
        float [N] -> float [N].
        """
        return self.total(x) / self.total(torch.ones_like(x)).clamp(min=1)
