"""Metrics that show how far behavior, proximal and current policy differ, and why.

Functions return scalars under their metric names. Means are over trained tokens of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.parts import Parts


def mean(x: Tensor) -> float:
    """Return the mean of all elements, 0 if there are none: float32 [...] -> number."""
    return float(x.mean()) if x.numel() else 0.0


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def behavior_metrics(
    proximal_logprobs: Tensor, *, behavior_logprobs: Tensor, raw_weights: Tensor, is_bounded: Tensor
) -> dict[str, float]:
    """Return the weights of the behavior correction and the distance that they correct.

    proximal_logprobs, behavior_logprobs, raw_weights: float32 [R]; is_bounded: bool [R]; trained
    tokens only -> mean and maximum of the weights w before their bounds, the share of bounded ones,
    KL(behavior, proximal) by the estimator k3, and
      effective_sample_size = (sum w)^2 / (R sum w^2), in (0, 1], 1 = as useful as fresh samples
    (Kish 1965).
    """
    effective = torch.ones(())
    if len(raw_weights):
        squares = raw_weights.square().sum()
        effective = raw_weights.sum().square() / (len(raw_weights) * squares)
    kl = kl_estimate(behavior_logprobs, ref_logprobs=proximal_logprobs, estimator="k3")
    return {
        "policy/behavior_weight_mean": mean(raw_weights),
        "policy/behavior_weight_max": _max(raw_weights),
        "policy/behavior_weight_clipped_share": mean(is_bounded.float()),
        "policy/effective_sample_size": float(effective),
        "policy/kl_behavior_proximal": mean(kl),
    }


def mismatch_metrics(
    proximal_logprobs: Tensor, *, behavior_logprobs: Tensor, oldest_ages: Tensor
) -> dict[str, float]:
    """Return |proximal - behavior| by cause: the numerics of the engine, or training since then.

    proximal_logprobs, behavior_logprobs: float32 [R]; oldest_ages: int64 [R], learner version minus
    the oldest version among the tokens of the same sequence; trained tokens only -> metrics of this
    project, no paper.  A token of the learner's version counts as stale if its sequence began under
    older weights, because it attended to their keys and values.  A cause without tokens has no
    metric.
    """
    difference = (proximal_logprobs - behavior_logprobs).abs()
    fresh, stale = difference[oldest_ages == 0], difference[oldest_ages > 0]
    metrics = {}
    if fresh.numel():
        metrics["mismatch/engine_abs_mean"] = mean(fresh)
        metrics["mismatch/engine_abs_max"] = _max(fresh)
    if stale.numel():
        metrics["mismatch/stale_abs_mean"] = mean(stale)
    return metrics


def explained_variance(values: Tensor, *, returns: Tensor) -> float:
    """Return 1 - Var(return - V) / Var(return), or 0 if the returns do not vary.

    values, returns: float32 [R], trained tokens only -> 1 = the critic predicts the returns, 0 = it
    predicts them as well as their mean does (the coefficient of determination R^2).
    """
    if len(returns) < 2 or float(returns.var()) == 0.0:
        return 0.0
    return 1.0 - float((returns - values).var() / returns.var())


def reward_metrics(
    rewards: Tensor, *, group_index: Tensor, num_groups: int, pass_reward: float
) -> dict[str, float]:
    """Return mean and spread of the task reward, and the shares of uniform groups.

    rewards: float32 [B], before scaling; group_index: int64 [B] -> solve_all and solve_none are the
    shares of groups of which all, or no, samples reach pass_reward.  Such groups have no advantage,
    so they contribute no policy gradient (DAPO, arXiv 2503.14476 sec. 3.2).
    """
    is_solved = rewards >= pass_reward
    groups = Parts(index=group_index, count=num_groups, mask=torch.ones_like(is_solved))
    num_solved = groups.sums(is_solved.float())
    share = num_solved / groups.sums(torch.ones_like(rewards)).clamp(min=1)
    return {
        "reward/mean": mean(rewards),
        "reward/std": float(rewards.std(correction=0)),
        "reward/solve_all": mean((share == 1).float()),
        "reward/solve_none": mean((share == 0).float()),
    }
