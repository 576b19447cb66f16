"""Advantages: how much better a token was than expected, from rewards (group estimators) or from rewards and values (GAE).

Invariants: pure tensor functions; tokens that do not count neither receive an advantage nor enter any statistic.
Called by the learner with whole batches, so every statistic is global.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GroupEstimator = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(rewards: Tensor, *, group_index: Tensor, num_groups: int, counts: Tensor, estimator: GroupEstimator) -> Tensor:
    """Compare each member's reward with the other members of its group.

    rewards: float32 [B]; group_index: int64 [B] in 0..num_groups-1; counts: bool [B], members that enter the statistics -> float32 [B].
    With n, mean and unbiased std over the counted members of the group:
      grpo     (r - mean) / (std + 1e-6)       arXiv 2402.03300 eq. 3
      dr_grpo  r - mean                        arXiv 2503.20783 sec. 3.1
      rloo     r - mean of the others = (r - mean) n / (n - 1)    arXiv 2402.14740 eq. 6
    Members that do not count, and the only member of a group, have advantage 0.
    """
    counted = counts.to(rewards.dtype)

    def per_group(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add_(0, group_index, x)

    n = per_group(counted)
    mean = per_group(rewards * counted) / n.clamp(min=1)
    centered = (rewards - mean[group_index]) * counted
    if estimator == "grpo":
        variance = per_group(centered.square()) / (n - 1).clamp(min=1)
        advantages = centered / (variance.sqrt()[group_index] + 1e-6)
    elif estimator == "rloo":
        advantages = centered * (n / (n - 1).clamp(min=1))[group_index]
    else:
        advantages = centered
    return torch.where((n > 1)[group_index], advantages, 0.0)


def gae(rewards: Tensor, *, values: Tensor, bootstrap: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over right-padded rows, skipping tokens that the policy did not write.

    rewards, values: float32 [B, L]; mask: bool [B, L]; bootstrap: float32 [B], the value after the last token (0 unless truncated)
    -> advantages, returns: float32 [B, L], 0 where masked.
    With t+1 the next unmasked token:  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  return = A + V
    (arXiv 1506.02438 eq. 16).  Rewards of masked tokens are not counted.
    """
    next_value = bootstrap
    next_advantage = torch.zeros_like(bootstrap)
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        columns.append(next_advantage)
    advantages = torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(rewards)
    return advantages.masked_fill(~mask, 0.0), (advantages + values).masked_fill(~mask, 0.0)


def normalize_advantages(advantages: Tensor, *, mask: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-5) with mean and population std over the unmasked tokens; 0 where masked.

    advantages: float32 [R]; mask: bool [R] -> float32 [R].
    """
    weight = mask.to(advantages.dtype)
    n = weight.sum().clamp(min=1)
    mean = (advantages * weight).sum() / n
    centered = (advantages - mean) * weight
    std = (centered.square().sum() / n).sqrt()
    return centered / (std + 1e-5)
