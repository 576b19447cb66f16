"""Advantages: how much better a token was than expected, from rewards alone (group estimators,
returns) or with values (GAE, V-trace).

Invariants: pure tensor functions; tokens that do not count neither receive an advantage nor enter
any statistic. Called by the learner with whole batches, so every statistic is global.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GroupEstimator = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(
    rewards: Tensor,
    *,
    group_index: Tensor,
    num_groups: int,
    counts: Tensor,
    estimator: GroupEstimator,
) -> Tensor:
    """Compare each member's reward with the other members of its group.

    rewards: float32 [B]; group_index: int64 [B] in 0..num_groups-1; counts: bool [B], members that
    enter the statistics -> float32 [B]. With n, mean and unbiased std over the counted members of
    the group:
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


def gae(
    rewards: Tensor, *, values: Tensor, bootstrap: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over right-padded rows, skipping tokens that the policy did
    not write.

    rewards, values: float32 [B, L]; mask: bool [B, L]; bootstrap: float32 [B], the value after the
    last token (0 unless truncated) -> advantages, returns: float32 [B, L], 0 where masked. With t+1
    the next unmasked token:  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam
    A_{t+1},  return = A + V (arXiv 1506.02438 eq. 16).  Rewards of masked tokens are not counted.
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


def returns_to_go(rewards: Tensor, *, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on, over right-padded rows; masked tokens are
    skipped.

    rewards: float32 [B, L]; mask: bool [B, L] -> float32 [B, L], 0 where masked.  G_t = r_t + gamma
    G_{t+1}, t+1 the next unmasked token. Less a baseline per sequence these are the advantages of
    REINFORCE++ (arXiv 2501.03262; baseline 0, or the mean reward of the group) and of ReMax (arXiv
    2310.10505; baseline = reward of the greedy answer).
    """
    nothing = torch.zeros_like(rewards)
    returns, _ = gae(
        rewards,
        values=nothing,
        bootstrap=nothing.new_zeros(len(rewards)),
        mask=mask,
        gamma=gamma,
        lam=1.0,
    )
    return returns


def group_means(rewards: Tensor, *, group_index: Tensor, num_groups: int, counts: Tensor) -> Tensor:
    """Mean reward of the counted members of each member's group: float32 [B] -> float32 [B]; 0 in a
    group without any.
    """
    counted = counts.to(rewards.dtype)
    total = rewards.new_zeros(num_groups).index_add_(0, group_index, rewards * counted)
    n = rewards.new_zeros(num_groups).index_add_(0, group_index, counted)
    return (total / n.clamp(min=1))[group_index]


def vtrace(
    rewards: Tensor,
    *,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    log_ratio: Tensor,
    gamma: float,
    lam: float,
    rho_max: float,
    c_max: float,
) -> tuple[Tensor, Tensor]:
    """V-trace (arXiv 1802.01561 sec. 4.1) over right-padded rows, skipping masked tokens.

    As `gae`; log_ratio: float32 [B, L], proximal - behavior log-probs -> advantages, value targets:
    float32 [B, L], 0 where masked. With t+1 the next unmasked token, w_t = exp(log_ratio_t), rho_t
    = min(rho_max, w_t), c_t = lam min(c_max, w_t):
      v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma c_t (v_{t+1} - V_{t+1}),  A_t = r_t +
      gamma v_{t+1} - V_t
    The paper's factor rho_t of the policy gradient is not in A_t: the loss applies the behavior
    weight, whatever its bounds.
    """
    weight = log_ratio.exp()
    rho, c = weight.clamp(max=rho_max), lam * weight.clamp(max=c_max)
    next_value, next_target = bootstrap, bootstrap
    advantages, targets = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        here, value, reward = mask[:, t], values[:, t], rewards[:, t]
        target = (
            value
            + rho[:, t] * (reward + gamma * next_value - value)
            + gamma * c[:, t] * (next_target - next_value)
        )
        advantages[:, t] = torch.where(here, reward + gamma * next_target - value, 0.0)
        targets[:, t] = torch.where(here, target, 0.0)
        next_target, next_value = (
            torch.where(here, target, next_target),
            torch.where(here, value, next_value),
        )
    return advantages, targets


def normalize_advantages(
    advantages: Tensor, *, mask: Tensor, part_index: Tensor, num_parts: int
) -> Tensor:
    """(A - mean) / (std + 1e-5) with mean and population std over the unmasked tokens of the
    token's part; 0 where masked.

    advantages: float32 [R]; mask: bool [R]; part_index: int64 [R] in 0..num_parts-1 (a single part
    is the whole batch) -> float32 [R].
    """

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(num_parts).index_add_(0, part_index, torch.where(mask, x, 0.0))

    n = total(torch.ones_like(advantages)).clamp(min=1)
    centered = torch.where(mask, advantages - (total(advantages) / n)[part_index], 0.0)
    std = (total(centered.square()) / n).sqrt()
    return centered / (std[part_index] + 1e-5)
