"""The loss of a critic on one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.losses import value_loss
from async_rl.batching.packing import Pass
from async_rl.config.algorithm import CriticConfig
from async_rl.learner.records import Step


def value_pass_loss(
    critic: CriticConfig | None, step: Step, row: Pass, values: Tensor | None, weights: Tensor
) -> Tensor:
    """The pass's part of the minibatch's value loss. weights: float32 [R], those of the batch."""
    old_values, targets, index = step.before.values, step.value_targets, row.token_index
    if critic is None or values is None or old_values is None or targets is None:
        raise ValueError("a critic is trained on the returns of gae and vtrace only")
    clip = critic.value_clip
    losses = value_loss(values, old_values=old_values[index], returns=targets[index], clip=clip)
    return torch.where(weights[index] > 0, losses * weights[index], 0.0).sum()
