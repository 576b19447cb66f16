"""The state of the objective that lasts over steps: the KL coefficient and the moments of returns.

It is part of every checkpoint. Invariant: it changes only at the end of a step and only by numbers
of the whole batch, so it is the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.kl import adapted_kl_coef
from async_rl.algorithms.value_norm import Moments, ValueUnits
from async_rl.config.algorithm import AlgorithmConfig


class ObjectiveState:
    """The current KL coefficient, and the moments of the returns so far.

    The moments do not change if algorithm.value_norm=none.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.kl_coef = algorithm.kl_coef
        self.moments = Moments()

    @property
    def units(self) -> ValueUnits:
        """The current unit of the critic's values."""
        return self.moments.units(eps=self._algorithm.value_norm_eps)

    def observe(self, returns: Tensor, mask: Tensor) -> tuple[Moments, Tensor]:
        """Return the moments including the trained tokens' returns, and the critic's targets.

        returns: float32 [R]; mask: bool [R] -> targets: float32 [R], the returns in the unit of the
        new moments.
        """
        algorithm = self._algorithm
        if algorithm.value_norm == "none":
            return self.moments, returns
        moments = self.moments.observed(
            returns[mask], kind=algorithm.value_norm, beta=algorithm.value_norm_beta
        )
        return moments, moments.units(eps=algorithm.value_norm_eps).to_values(returns)

    def end_step(self, moments: Moments, *, kl: float, num_sequences: int) -> None:
        """Update the state after a step. kl: nats of KL(proximal, reference) per sequence."""
        algorithm = self._algorithm
        self.moments = moments
        if algorithm.kl_controller == "adaptive":
            self.kl_coef = adapted_kl_coef(
                self.kl_coef,
                kl=kl,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
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
        if self._algorithm.kl_controller == "adaptive":
            self.kl_coef = kl_coef
