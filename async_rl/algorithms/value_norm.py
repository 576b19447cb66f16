"""Running mean and spread of the returns, in whose units the critic learns."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from async_rl.algorithms.across import ALONE, Across
from async_rl.core.frozen import frozen

ValueNorm = Literal["exp", "ma"]

_MIN_VARIANCE = 1e-2
_BOUND = 5.0


@frozen
class ValueUnits:
    """The unit of the critic's values: return = value * std + mean."""

    mean: float = 0.0
    std: float = 1.0

    def to_returns(self, values: Tensor) -> Tensor:
        """Convert the critic's values to the unit of returns: float32 [...] -> float32 [...]."""
        return values * self.std + self.mean

    def to_values(self, returns: Tensor) -> Tensor:
        """Convert returns to the critic's unit, bounded: float32 [...] -> float32 [...].

        clip((return - mean) / std, -5, 5)
        """
        return torch.clamp((returns - self.mean) / self.std, -_BOUND, _BOUND)


@frozen
class Moments:
    """Weighted sums of x and x^2, and the sum of the weights: mean = total / weight."""

    total: float = 0.0
    total_square: float = 0.0
    weight: float = 0.0

    def observed(
        self, returns: Tensor, *, kind: ValueNorm, beta: float, across: Across = ALONE
    ) -> Moments:
        """Return the moments including these returns, or the same moments if there are none.

        returns: float32 [N], of each rank its own; the moments are the same on all.  kind "ma":
        every token has weight 1, forever.  kind "exp": the mean of the batch has weight 1 - beta
        and the earlier moments are multiplied by beta; the division by `weight` removes the bias
        of the start (Adam, arXiv 1412.6980 sec. 3).
        """
        values = returns.double()
        sums = [values.sum(), values.square().sum(), torch.ones_like(values).sum()]
        total, total_square, n = across.sum(torch.stack(sums)).tolist()
        if n == 0:
            return self
        decay, share = 1.0, 1.0
        if kind == "exp":
            decay, share = beta, (1 - beta) / n
        return Moments(
            total=decay * self.total + share * total,
            total_square=decay * self.total_square + share * total_square,
            weight=decay * self.weight + share * n,
        )

    def units(self, *, eps: float) -> ValueUnits:
        """Return mean and standard deviation; mean 0 and std 1 before the first observation.

        The std is at least 0.1, so that equal returns do not divide by 0.  A weight below eps
        counts as eps.
        """
        if self.weight == 0:
            return ValueUnits()
        weight = max(self.weight, eps)
        mean = self.total / weight
        variance = max(self.total_square / weight - mean**2, _MIN_VARIANCE)
        return ValueUnits(mean=mean, std=float(variance) ** 0.5)
