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
from async_rl.config.algorithm import AdaptiveKl, AlgorithmConfig, ExpValueNorm, NoValueNorm


class ObjectiveState:
    """The current KL coefficient, and the moments of the returns so far.

    The moments do not change if algorithm.advantage.critic.value_norm=none.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        reference, critic = algorithm.reference, algorithm.critic
        self._controller = reference.controller if reference is not None else None
        self._value_norm = critic.value_norm if critic is not None else NoValueNorm(kind="none")
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
        norm = self._value_norm
        if isinstance(norm, NoValueNorm):
            return self.moments, returns
        beta = norm.beta if isinstance(norm, ExpValueNorm) else 0.0
        moments = self.moments.observed(returns[mask], kind=norm.kind, beta=beta, across=across)
        return moments, self._units(moments).to_values(returns)

    def _units(self, moments: Moments) -> ValueUnits:
        norm = self._value_norm
        return ValueUnits() if isinstance(norm, NoValueNorm) else moments.units(eps=norm.eps)

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
