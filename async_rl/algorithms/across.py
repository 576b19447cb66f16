"""Sums and maxima over values of which each rank of the learner has a part.

Every rank must ask for the same ones in the same order, whatever its own part contains, because
with several ranks each is a collective operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from async_rl.core.frozen import frozen


def _alone(x: Tensor) -> Tensor:
    return x


@frozen
class Across:
    """sum, maximum: replace the elements of a tensor by their sum or maximum over the ranks."""

    sum: Callable[[Tensor], Tensor] = _alone
    maximum: Callable[[Tensor], Tensor] = _alone

    def mean(self, x: Tensor) -> float:
        """Return the mean of all elements of all ranks, 0 if there are none: any dtype [...] ->
        number.
        """
        sums: list[float] = self.sum(torch.stack([x.double().sum(), _count(x)])).tolist()
        return sums[0] / max(sums[1], 1.0)

    def largest(self, x: Tensor) -> float:
        """Return the largest element of all ranks, 0 if there are none: any dtype [...] ->
        number.
        """
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
