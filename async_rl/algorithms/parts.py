"""Sums and means over parts of a batch: the members of a group, or the tokens of a sequence.

Each rank of the learner has some elements of a batch. `Across` adds up the values of all ranks, and
`Parts` the values of each group or sequence. With several ranks both are collective operations, so
every rank must compute the same sums in the same order, whatever elements it has.
"""

import math

import torch
from torch import Tensor

from async_rl.core.frozen import frozen


class Across:
    """Sums over the elements of all ranks; by itself of one rank, which has all."""

    def sum(self, x: Tensor) -> Tensor:
        """Replace x by its sum over all parts of the batch (collective) and return it."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Replace x by its largest values over all parts (collective) and return it."""
        return x

    def mean(self, x: Tensor) -> float:
        """Return the mean of all elements of all ranks, 0 if there are none: any dtype [...] ->
        number.
        """
        own = torch.stack([x.double().sum(), _count(x)])
        sums: list[float] = self.sum(own).tolist()
        total, count = sums
        return total / max(count, 1.0)

    def largest(self, x: Tensor) -> float:
        """Return the largest element of all ranks, 0 if there are none: any dtype [...] ->
        number.
        """
        # A rank without elements must take part in the collective without changing the maximum.
        mine = x.double().max() if x.numel() else _count(x) - math.inf
        largest = float(self.maximum(mine))
        return largest if largest > -math.inf else 0.0

    def variance(self, x: Tensor) -> float:
        """Return the population variance of all elements of all ranks, 0 if there are none: float
        [...] -> number.
        """
        return self.mean((x.double() - self.mean(x)).square())


def _count(x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.float64, device=x.device)


ALONE = Across()
"""One process has all values."""


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
        # Counted over all ranks like the sums, so ranks with few elements weigh as much.
        counts = self.sums(torch.ones_like(x)).clamp(min=1)
        return (self.sums(x) / counts).to(x.dtype)[self.index]
