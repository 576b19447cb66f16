"""What the objective remembers from step to step: the KL coefficient and the running moments of
returns. Part of every checkpoint.

Invariant: it changes at the end of a step only, from numbers of the whole batch, so it is the same
on every rank.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from async_rl.algorithms.kl import adapted_kl_coef
from async_rl.algorithms.value_norm import Moments, normalize
from async_rl.config.algorithm import AlgorithmConfig
from async_rl.learner.objective import ValueUnits


class ObjectiveState:
    """kl_coef: its value now. moments: of the returns so far, untouched without value
    normalisation.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.kl_coef = algorithm.kl_coef
        self.moments = Moments()

    @property
    def units(self) -> ValueUnits:
        """The critic's units now."""
        return self._units(self.moments)

    def observe(self, returns: Tensor, mask: Tensor) -> tuple[Moments, Tensor]:
        """The moments with the returns of the trained tokens taken in, and the returns in the
        critic's units under them: float32 [R].
        """
        kind = self._algorithm.value_norm
        if kind == "none":
            return self.moments, returns
        moments = self.moments.observed(
            returns[mask], kind=kind, beta=self._algorithm.value_norm_beta
        )
        units = self._units(moments)
        return moments, normalize(returns, mean=units.mean, std=units.std)

    def end_step(self, moments: Moments, *, kl: float, num_sequences: int) -> None:
        """The step is done. kl: nats of KL(proximal, reference) per sequence."""
        self.moments = moments
        if self._algorithm.kl_controller == "adaptive":
            target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
            self.kl_coef = adapted_kl_coef(
                self.kl_coef, kl=kl, target=target, horizon=horizon, num_sequences=num_sequences
            )

    def _units(self, moments: Moments) -> ValueUnits:
        mean, std = moments.mean_and_std(eps=self._algorithm.value_norm_eps)
        return ValueUnits(mean=mean, std=std)

    def state_dict(self) -> dict[str, Tensor]:
        """For torch.distributed.checkpoint, which saves and restores whatever has these two
        methods.
        """
        return {
            "numbers": torch.tensor(
                [self.kl_coef, *dataclasses.astuple(self.moments)], dtype=torch.float64
            )
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse. An adaptive coefficient goes on from where it was, a fixed one is what the
        configuration says.
        """
        kl_coef, total, total_square, weight = state["numbers"].tolist()
        self.moments = Moments(total=total, total_square=total_square, weight=weight)
        if self._algorithm.kl_controller == "adaptive":
            self.kl_coef = kl_coef
