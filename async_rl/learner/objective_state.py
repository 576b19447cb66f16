"""The numbers of the objective that last over steps: the KL coefficient and the moments of returns.

They are part of every checkpoint. Invariant: they change only at the end of a step and only by
numbers of the whole batch, so they are the same on every rank.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.parts import ALONE, Across
from async_rl.config.algorithm import AdaptiveKl, AlgorithmConfig, LossKl, RewardKl

ValueNorm = Literal["exp", "ma"]

# The decay per step of the exponential moments: the number of AReaL, so that its runs can be
# compared. A step of 128 samples forgets slowly.
_BETA = 0.99995
# Equal returns have variance 0. A standard deviation of 0.1 keeps their targets finite.
_MIN_VARIANCE = 1e-2
# Targets beyond five standard deviations would dominate the squared loss of a batch.
_BOUND = 5.0
_MOST_ERROR = 0.2
"""The error of the KL, as a share of its target, that one step corrects."""


class Moments(NamedTuple):
    """Weighted sums of returns and of their squares, and the sum of the weights.

    They are the unit of the critic's values: return = value * std + mean, with mean 0 and std 1
    before the first return.
    """

    total: float = 0.0
    total_square: float = 0.0
    weight: float = 0.0

    def observed(self, returns: Tensor, *, kind: ValueNorm, across: Across = ALONE) -> Moments:
        """Return the moments including these returns, or the same moments if there are none.

        returns: float32 [N], of each rank its own; the moments are the same on all.  kind "ma":
        every token has weight 1, forever.  kind "exp": the mean of the batch has weight
        1 - _BETA and the earlier moments are multiplied by _BETA; the division by `weight` removes
        the bias of the start (Adam, arXiv 1412.6980 sec. 3).
        """
        values = returns.double()
        sums = [values.sum(), values.square().sum(), torch.ones_like(values).sum()]
        total, total_square, n = across.sum(torch.stack(sums)).tolist()
        if n == 0:
            return self
        decay = 1.0
        share = 1.0
        if kind == "exp":
            decay = _BETA
            share = (1 - _BETA) / n
        return Moments(
            total=decay * self.total + share * total,
            total_square=decay * self.total_square + share * total_square,
            weight=decay * self.weight + share * n,
        )

    @property
    def mean(self) -> float:
        """The mean of the returns."""
        return self.total / (self.weight or 1.0)

    @property
    def std(self) -> float:
        """The standard deviation, at least 0.1, so that equal returns do not divide by 0."""
        if self.weight == 0:
            return 1.0
        return math.sqrt(max(self.total_square / self.weight - self.mean**2, _MIN_VARIANCE))

    def to_returns(self, values: Tensor) -> Tensor:
        """Convert the critic's values to the unit of returns: float32 [...] -> float32 [...]."""
        return values * self.std + self.mean

    def to_values(self, returns: Tensor) -> Tensor:
        """Convert returns to the critic's unit, bounded: float32 [...] -> float32 [...].

        clip((return - mean) / std, -5, 5)
        """
        return torch.clamp((returns - self.mean) / self.std, -_BOUND, _BOUND)


class ObjectiveState:
    """The current KL coefficient, and the moments of the returns so far.

    There are no moments if algorithm.advantage.critic.value_norm=none.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        reference: RewardKl | LossKl | None = algorithm.reference
        critic = algorithm.critic
        self._controller = reference.controller if reference is not None else None
        self._value_norm = critic.value_norm.kind if critic is not None else "none"
        self.kl_coef = reference.coef if reference is not None else 0.0
        self.moments = Moments()

    def observe(
        self, returns: Tensor | None, mask: Tensor, across: Across = ALONE
    ) -> tuple[Moments, Tensor | None]:
        """Return the moments including the trained tokens' returns, and the critic's targets.

        returns: float32 [R], None without a critic; mask: bool [R] -> targets: float32 [R], the
        returns in the unit of the new moments.  across: the ranks that have returns.
        """
        if returns is None or self._value_norm == "none":
            return self.moments, returns
        moments = self.moments.observed(returns[mask], kind=self._value_norm, across=across)
        return moments, moments.to_values(returns)

    def end_step(self, moments: Moments, *, kl: float, num_sequences: int) -> None:
        """Update the state after a step. kl: nats of KL(proximal, reference) per sequence.

        Above the target of the adaptive controller the coefficient grows:

        kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon)
        (arXiv 1909.08593 sec. 2.2)
        """
        controller = self._controller
        self.moments = moments
        if isinstance(controller, AdaptiveKl):
            error = min(max(kl / controller.target - 1, -_MOST_ERROR), _MOST_ERROR)
            self.kl_coef *= 1 + error * num_sequences / controller.horizon

    def numbers(self) -> tuple[float, float, float, float]:
        """Return the state as a checkpoint has it."""
        return self.kl_coef, *self.moments

    def restore(self, numbers: tuple[float, float, float, float]) -> None:
        """Restore the state; a fixed KL coefficient stays as configured."""
        kl_coef, *moments = numbers
        # Otherwise they are of a time with other settings.
        if self._value_norm != "none":
            self.moments = Moments(*moments)
        if isinstance(self._controller, AdaptiveKl):
            # A fixed coefficient follows the settings, which a resume may change.
            self.kl_coef = kl_coef
