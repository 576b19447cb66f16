"""Advantages: how much better a token is than expected.

Group estimators and discounted returns need rewards only; GAE and V-trace also need values.
Invariant: a token that does not count receives no advantage and enters no statistic. The learner
calls these functions with the whole batch, so every statistic is global. Shapes that do not match
raise RuntimeError in torch. Rewards are in the unit of the scaled score; values are not checked
here, because the learner checks every loss and gradient.
"""

from typing import Literal

import torch
from torch import Tensor

from async_rl.algorithms.parts import Parts

GroupEstimator = Literal["grpo", "dr_grpo", "rloo"]


def group_advantages(
    returns: Tensor, *, calls: Tensor, groups: Parts, estimator: GroupEstimator
) -> Tensor:
    """Compare the return of each call with the other samples of its group.

    returns: float32 [P, K], of up to K calls of each sample; calls: bool [P, K], True where there
    is one, at least once in a row; groups: the groups of the P samples -> float32 [P, K].  A sample
    weighs one, however many calls it has: with m the mean return of its calls, n, mean and unbiased
    std over the counted samples of the group, the variance being the mean over the calls of each,
      grpo     (r - mean) / (std + 1e-6)            arXiv 2402.03300 eq. 3; returns: sec. 4.1.3
      dr_grpo  r - mean                             arXiv 2503.20783 sec. 3.1
      rloo     r - mean of m of other samples       arXiv 2402.14740 eq. 6
    A sample that does not count, and the only counted sample of a group, have advantage 0.
    """

    def mean_of_calls(x: Tensor) -> Tensor:
        return torch.where(calls, x, 0.0).sum(1) / calls.sum(1)

    own = mean_of_calls(returns)
    n = groups.total(torch.ones_like(own))
    mean = groups.mean(own)
    # At least 1: the result of a group of one is replaced by 0 below.
    others = (n - 1).clamp(min=1)
    advantages = returns - mean[:, None]
    if estimator == "grpo":
        std = (groups.total(mean_of_calls(advantages.square())) / others).sqrt()
        advantages = advantages / (std + 1e-6)[:, None]
    elif estimator == "rloo":
        advantages = advantages + ((own - mean) / others)[:, None]
    is_compared = calls & ((n > 1) & groups.mask)[:, None]
    return torch.where(is_compared, advantages, 0.0)


def temporal_differences(
    rewards: Tensor,
    *,
    values: Tensor,
    bootstrap: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    log_ratio: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and value targets over right-padded rows: by generalised advantage
    estimation, or by V-trace with a log_ratio.

    rewards, values, log_ratio: float32 [B, L], log_ratio = proximal - behavior log-probs; mask:
    bool [B, L], True where the policy wrote the token; bootstrap: float32 [B], the value after the
    last token (0 unless the response was truncated) -> advantages, targets: float32 [B, L], 0 where
    masked.  With t+1 the next unmasked token, and rho_t = min(1, exp(log_ratio_t)), 1 for GAE:
      v_t = V_t + rho_t (r_t + gamma V_{t+1} - V_t) + gamma lam rho_t (v_{t+1} - V_{t+1})
      GAE      A_t = v_t - V_t                        arXiv 1506.02438 eq. 16
      V-trace  A_t = r_t + gamma v_{t+1} - V_t        arXiv 1802.01561 sec. 4.1 with both caps at 1,
                                                      as in all published uses
    Rewards of masked tokens are ignored.  The paper of V-trace multiplies the policy gradient by
    rho_t.  That factor is not part of A_t, because the loss multiplies by the behavior weight,
    which has its own bounds.
    """
    rho = torch.ones_like(rewards)
    if log_ratio is not None:
        # A lower cap would bias the values towards an older policy, a higher one would let single
        # tokens dominate.
        rho = log_ratio.exp().clamp(max=1.0)
    next_value = bootstrap
    next_target = bootstrap
    targets = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        is_written = mask[:, t]
        value = values[:, t]
        delta = rewards[:, t] + gamma * next_value - value
        later = gamma * lam * (next_target - next_value)
        target = value + rho[:, t] * (delta + later)
        targets[:, t] = torch.where(is_written, target, 0.0)
        following[:, t] = next_target
        # At a masked token both carry over unchanged, so the token is skipped.
        next_target = torch.where(is_written, target, next_target)
        next_value = torch.where(is_written, value, next_value)
    reached = targets if log_ratio is None else rewards + gamma * following
    return (reached - values).masked_fill(~mask, 0.0), targets


def returns_to_go(rewards: Tensor, *, mask: Tensor, gamma: float) -> Tensor:
    """Sum the discounted rewards from each token to the end of its right-padded row.

    rewards: float32 [B, L]; mask: bool [B, L] -> float32 [B, L], 0 where masked.
    G_t = r_t + gamma G_{t+1} with t+1 the next unmasked token.  Minus a baseline per sequence these
    are the advantages of REINFORCE++ (arXiv 2501.03262: baseline 0, or the mean reward of the
    group) and of ReMax (arXiv 2310.10505: baseline = reward of the greedy answer).
    """
    # With values of 0 and lambda 1 the advantage of GAE is the return.
    zeros = torch.zeros_like(rewards)
    returns, _ = temporal_differences(
        rewards, values=zeros, bootstrap=zeros.sum(1), mask=mask, gamma=gamma, lam=1.0
    )
    return returns


def normalize_advantages(advantages: Tensor, *, parts: Parts) -> Tensor:
    """Shift and scale the advantages of each part to mean 0 and standard deviation 1.

    advantages: float32 [R]; parts: the groups of the R tokens, or one part for the whole batch
    -> float32 [R], 0 where masked.  (A - mean) / (std + 1e-5) with mean and population std over the
    counted tokens of the part (the normalisation of PPO implementations, no paper).
    """
    centered = torch.where(parts.mask, advantages - parts.mean(advantages), 0.0)
    std = parts.mean(centered.square()).sqrt()
    return centered / (std + 1e-5)
