"""Running mean and spread of returns, in whose units the critic learns.

Pure: observing gives a new `Moments`.  Every rank observes the whole batch, so all agree without
talking.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

ValueNorm = Literal["exp", "ma"]

_MIN_VARIANCE = 1e-2
_BOUND = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Weighted sums of x, of x^2, and of the weights; mean = total / weight. All 0 = nothing seen
    yet: mean 0, spread 1.
    """

    total: float = 0.0
    total_square: float = 0.0
    weight: float = 0.0

    def observed(self, returns: Tensor, *, kind: ValueNorm, beta: float) -> Moments:
        """With these returns (float32 [N]) taken in; unchanged if there are none.

        exp: every batch counts 1 - beta times its mean, what came before beta times; dividing by
        the weight takes the start's bias off.
        ma:  every token counts once, for ever.
        """
        n = returns.numel()
        if not n:
            return self
        total, total_square = float(returns.double().sum()), float(returns.double().square().sum())
        if kind == "ma":
            return Moments(
                total=self.total + total,
                total_square=self.total_square + total_square,
                weight=self.weight + n,
            )
        share = 1 - beta
        return Moments(
            total=beta * self.total + share * total / n,
            total_square=beta * self.total_square + share * total_square / n,
            weight=beta * self.weight + share,
        )

    def mean_and_std(self, *, eps: float) -> tuple[float, float]:
        """mean, and std of at least 0.1; weights below eps are taken as eps."""
        if self.weight == 0:
            return 0.0, 1.0
        weight = max(self.weight, eps)
        mean = self.total / weight
        return mean, float(max(self.total_square / weight - mean**2, _MIN_VARIANCE)) ** 0.5


def normalize(returns: Tensor, *, mean: float, std: float) -> Tensor:
    """clip((x - mean) / std, -5, 5): float32 [...] -> float32 [...]."""
    return torch.clamp((returns - mean) / std, -_BOUND, _BOUND)
