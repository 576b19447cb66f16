"""The state of the objective that lasts over steps: the KL coefficient and the moments of returns.

It is part of every checkpoint. Invariant: it changes only at the end of a step and only by numbers
of the whole batch, so it is the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.across import ALONE, Across
from async_rl.algorithms.kl import adapted_kl_coef
from async_rl.algorithms.value_norm import Moments, ValueUnits
from async_rl.config.algorithm import AdaptiveKl, AlgorithmConfig

# The decay per step of the exponential moments and the smallest weight that they are divided by:
# those of AReaL, with which runs are compared. A step of 128 samples forgets slowly enough.
_BETA = 0.99995
_LEAST_WEIGHT = 1e-5


class ObjectiveState:
    """The current KL coefficient, and the moments of the returns so far.

    The moments do not change if algorithm.advantage.critic.value_norm=none.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        reference, critic = algorithm.reference, algorithm.critic
        self._controller = reference.controller if reference is not None else None
        self._value_norm = critic.value_norm.kind if critic is not None else "none"
        self.kl_coef = reference.coef if reference is not None else 0.0
        self.moments = Moments()

    @property
    def units(self) -> ValueUnits:
        """The current unit of the critic's values."""
        return self._units(self.moments)

    def observe(
        self, returns: Tensor, mask: Tensor, across: Across = ALONE
    ) -> tuple[Moments, Tensor]:
        """Return the moments including the trained tokens' returns, and the critic's targets.

        returns: float32 [R]; mask: bool [R] -> targets: float32 [R], the returns in the unit of the
        new moments.  across: the ranks that have returns.
        """
        if self._value_norm == "none":
            return self.moments, returns
        moments = self.moments.observed(
            returns[mask], kind=self._value_norm, beta=_BETA, across=across
        )
        return moments, self._units(moments).to_values(returns)

    def _units(self, moments: Moments) -> ValueUnits:
        return ValueUnits() if self._value_norm == "none" else moments.units(eps=_LEAST_WEIGHT)

    def end_step(self, moments: Moments, *, kl: float, num_sequences: int) -> None:
        """Update the state after a step. kl: nats of KL(proximal, reference) per sequence."""
        controller = self._controller
        self.moments = moments
        if isinstance(controller, AdaptiveKl):
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                kl=kl,
                target=controller.target,
                horizon=controller.horizon,
                num_sequences=num_sequences,
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as torch.distributed.checkpoint saves it."""
        moments = self.moments
        numbers = [self.kl_coef, moments.total, moments.total_square, moments.weight]
        return {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state; a fixed KL coefficient stays as configured."""
        kl_coef, total, total_square, weight = state["numbers"].tolist()
        self.moments = Moments(total=total, total_square=total_square, weight=weight)
        if isinstance(self._controller, AdaptiveKl):
            self.kl_coef = kl_coef
