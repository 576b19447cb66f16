"""Metrics that show how far behavior, proximal and current policy differ, and why.

Functions return scalars under their metric names. Means are over trained tokens of the whole batch:
`across` adds up the tokens of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms.kl import kl_estimate
from async_rl.algorithms.parts import ALONE, Across, Parts


def mean(x: Tensor) -> float:
    """Return the mean of all elements, 0 if there are none: float32 [...] -> number."""
    return float(x.mean()) if x.numel() else 0.0


def behavior_metrics(
    proximal_logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    raw_weights: Tensor,
    is_bounded: Tensor,
    across: Across = ALONE,
) -> dict[str, float]:
    """Return the weights of the behavior correction and the distance that they correct.

    proximal_logprobs, behavior_logprobs, raw_weights: float32 [R]; is_bounded: bool [R]; trained
    tokens only -> mean and maximum of the weights w before their bounds, the share of bounded ones,
    KL(behavior, proximal) by the estimator k3, and
      effective_sample_size = (sum w)^2 / (R sum w^2), in (0, 1], 1 = as useful as fresh samples
    (Kish 1965).
    """
    mean_square = across.mean(raw_weights.double().square())
    mean_weight = across.mean(raw_weights)
    effective = mean_weight**2 / mean_square if mean_square else 1.0
    kl = kl_estimate(behavior_logprobs, ref_logprobs=proximal_logprobs, estimator="k3")
    return {
        "policy/behavior_weight_mean": mean_weight,
        "policy/behavior_weight_max": across.largest(raw_weights),
        "policy/behavior_weight_clipped_share": across.mean(is_bounded),
        "policy/effective_sample_size": effective,
        "policy/kl_behavior_proximal": across.mean(kl),
    }


def mismatch_metrics(
    proximal_logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    oldest_ages: Tensor,
    across: Across = ALONE,
) -> dict[str, float]:
    """Return |proximal - behavior| by cause: the numerics of the engine, or training since then.

    proximal_logprobs, behavior_logprobs: float32 [R]; oldest_ages: int64 [R], learner version minus
    the oldest version among the tokens of the same sequence; trained tokens only -> metrics of this
    project, no paper.  A token of the learner's version counts as stale if its sequence started
    under older weights, because it attended to their keys and values.  A cause without tokens has
    no metric.
    """
    difference = (proximal_logprobs - behavior_logprobs).abs()
    is_fresh, is_stale = oldest_ages == 0, oldest_ages > 0
    has_fresh, has_stale = across.largest(is_fresh), across.largest(is_stale)
    metrics = {}
    if has_fresh:
        metrics["mismatch/engine_abs_mean"] = across.mean(difference[is_fresh])
        metrics["mismatch/engine_abs_max"] = across.largest(difference[is_fresh])
    if has_stale:
        metrics["mismatch/stale_abs_mean"] = across.mean(difference[is_stale])
    return metrics


def explained_variance(values: Tensor, *, returns: Tensor, across: Across = ALONE) -> float:
    """Return 1 - Var(return - V) / Var(return), or 0 if the returns do not vary.

    values, returns: float32 [R], trained tokens only -> 1 = the critic predicts the returns, 0 = it
    predicts them as well as their mean does (the coefficient of determination R^2).
    """
    variance = across.variance(returns)
    unexplained = across.variance(returns - values)
    return 1.0 - unexplained / variance if variance else 0.0


def reward_metrics(
    rewards: Tensor, *, group_index: Tensor, num_groups: int, pass_reward: float
) -> dict[str, float]:
    """Return mean and spread of the task reward, and the shares of uniform groups.

    rewards: float32 [B], before scaling; group_index: int64 [B] -> solve_all and solve_none are the
    shares of groups in which every sample, or no sample, reaches pass_reward.  Such groups have no
    advantage, so they contribute no policy gradient (DAPO, arXiv 2503.14476 sec. 3.2).
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
