"""A policy loss, an advantage and a correction."""

import torch
from torch import Tensor

from async_rl.algorithms.losses import BehaviorWeights, PolicyLoss
from async_rl.algorithms.parts import Parts


def plain_ratio(
    log_ratio: Tensor, *, advantages: Tensor, behavior_weight: Tensor, sequences: Parts
) -> PolicyLoss:
    """Return the surrogate without a clip."""
    is_clipped = torch.zeros_like(sequences.mask)
    return PolicyLoss(-behavior_weight * log_ratio.exp() * advantages, is_clipped, is_clipped)


def above_mean(rewards: Tensor, *, groups: Parts) -> Tensor:
    """Return the sign of each reward's distance from the mean of its group."""
    return (rewards - groups.mean(rewards)).sign()


def half(log_ratio: Tensor, *, sequences: Parts) -> BehaviorWeights:
    """Return weights of one half."""
    weights = torch.full_like(log_ratio, 0.5)
    return BehaviorWeights(weights, log_ratio.exp(), torch.zeros_like(sequences.mask))
