"""Sums and means over parts of a batch: the members of a group, or the tokens of a sequence.

Group statistics, sequence ratios and sequence weights use the same two operations, so they share
the rule for elements that do not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.across import ALONE, Across
from async_rl.core.frozen import frozen


@frozen
class Parts:
    """N elements divided into `count` parts.

    index: int64 [N], the part of each element, in 0..count-1; mask: bool [N], the elements that
    enter a sum.  An index out of range raises IndexError or RuntimeError in torch.
    across: the ranks that have elements of these parts.
    """

    index: Tensor
    count: int
    mask: Tensor
    across: Across = ALONE

    def sums(self, x: Tensor) -> Tensor:
        """Return the sum over the counted elements of each part: float [N] -> float64 [count].

        A slot adds one element after another. In float32 it would lose ones above 2^24, and the
        mean of 20 million tokens would be off by half a standard deviation.
        """
        slots = x.new_zeros(self.count, dtype=torch.float64)
        slots.index_add_(0, self.index, torch.where(self.mask, x, 0.0).double())
        return self.across.sum(slots)

    def total(self, x: Tensor) -> Tensor:
        """Return at each element the sum of its part: float [N] -> float [N]."""
        return self.sums(x).to(x.dtype)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """Return at each element the mean of its part, 0 for a part without counted elements:
        float [N] -> float [N].
        """
        counts = self.sums(torch.ones_like(x)).clamp(min=1)
        return (self.sums(x) / counts).to(x.dtype)[self.index]
