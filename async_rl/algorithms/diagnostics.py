"""Numbers that tell whether a step can be trusted: how far behavior, proximal and current policy
are apart, and why.

Every function returns scalars under their metric names; all means are over trained tokens of the
whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.kl import kl_estimate


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def behavior_metrics(
    proximal_logprobs: Tensor, *, behavior_logprobs: Tensor, raw_weights: Tensor, is_bounded: Tensor
) -> dict[str, float]:
    """Weights of the behavior correction and the distance they correct.

    all float32 [R] except is_bounded bool [R], trained tokens only.  Of the unbounded weights w,
    those of tokens or of sequences as the
    correction has them: mean, max and effective_sample_size = (sum w)^2 / (R sum w^2) in (0, 1], 1
    = as good as fresh samples. KL(behavior, proximal) by k3.
    """
    raw = raw_weights
    size = raw.sum().square() / (len(raw) * raw.square().sum()) if len(raw) else torch.ones(())
    return {
        "policy/behavior_weight_mean": _mean(raw),
        "policy/behavior_weight_max": _max(raw),
        "policy/behavior_weight_clipped_share": _mean(is_bounded.float()),
        "policy/effective_sample_size": float(size),
        "policy/kl_behavior_proximal": _mean(
            kl_estimate(behavior_logprobs, ref_logprobs=proximal_logprobs, estimator="k3")
        ),
    }


def mismatch_metrics(
    proximal_logprobs: Tensor, *, behavior_logprobs: Tensor, oldest_ages: Tensor
) -> dict[str, float]:
    """|proximal - behavior| split by cause: the engine's numerics alone, or what training has
    changed since.

    float32 [R], oldest_ages int64 [R] (learner version - version of the oldest token of the same
    sequence), trained tokens only.  A token of the learner's own version counts as stale if its
    sequence began under older weights: the keys and values it attended to are theirs. A part
    without tokens is left out.
    """
    difference = (proximal_logprobs - behavior_logprobs).abs()
    fresh, stale = difference[oldest_ages == 0], difference[oldest_ages > 0]
    metrics = {}
    if fresh.numel():
        metrics = {"mismatch/engine_abs_mean": _mean(fresh), "mismatch/engine_abs_max": _max(fresh)}
    if stale.numel():
        metrics["mismatch/stale_abs_mean"] = _mean(stale)
    return metrics


def explained_variance(values: Tensor, *, returns: Tensor) -> float:
    """1 - Var(return - V) / Var(return): 1 = the critic knows the returns, 0 = no better than their
    mean. 0 if they do not vary.

    float32 [R], trained tokens only.
    """
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())


def reward_metrics(
    rewards: Tensor, *, group_index: Tensor, num_groups: int, pass_reward: float
) -> dict[str, float]:
    """Mean and spread of the task reward, and the shares of groups that are solved by all or none
    of their members.

    rewards: float32 [B], before scaling; group_index: int64 [B].  Such groups have no advantage and
    teach nothing.
    """
    solved = (rewards >= pass_reward).to(torch.float32)
    zeros = torch.zeros(num_groups, device=rewards.device)
    n = zeros.index_add(0, group_index, torch.ones_like(solved))
    share = zeros.index_add(0, group_index, solved) / n.clamp(min=1)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std(correction=0)),
        "reward/solve_all": _mean((share == 1).float()),
        "reward/solve_none": _mean((share == 0).float()),
    }
