"""The losses of policy and critic, per token, and the weights that turn tokens into one number.

Invariant: a loss is `sum(weights * token_loss)` with weights fixed by the whole minibatch, so it
may be summed over any micro-batches, packings and ranks without changing its gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.sequences import Sequences

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


class PolicyLoss(NamedTuple):
    """loss float32 [R]; is_clipped_low, is_clipped_high bool [R], tokens whose ratio the bound at
    that side changed.
    """

    loss: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor


def token_weights(
    mask: Tensor,
    *,
    sequence_index: Tensor,
    num_sequences: int,
    aggregation: Aggregation,
    constant_tokens: int | None,
) -> Tensor:
    """The share of each token in a mean over the masked tokens.

    mask: bool [R]; sequence_index: int64 [R] -> float32 [R], 0 where masked.  With S the number of
    sequences with a trained token:
      token_mean     1 / number of trained tokens
      sequence_mean  1 / (S * trained tokens of the token's sequence)
      sequence_sum  1 / (S * constant_tokens)  (Dr. GRPO, arXiv 2503.20783: no bias towards short
      answers)
    Raises ValueError for sequence_sum without its constant.
    """
    weight = mask.to(torch.float32)
    if aggregation == "token_mean":
        return weight / weight.sum().clamp(min=1)
    lengths = weight.new_zeros(num_sequences).index_add_(0, sequence_index, weight)
    trained = (lengths > 0).sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return weight / (lengths.clamp(min=1)[sequence_index] * trained)
    if constant_tokens is None:
        raise ValueError("sequence_sum needs constant_tokens")
    return weight / (constant_tokens * trained)


def clipped_loss(
    log_ratio: Tensor,
    *,
    advantages: Tensor,
    behavior_weight: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> PolicyLoss:
    """Clipped surrogate of PPO (arXiv 1707.06347 eq. 7), with dual clip (arXiv 1912.09729 eq. 5).

    all float32 [R].  With u = exp(log_ratio):  s = min(u A, clip(u, 1 - clip_low, 1 + clip_high)
    A);  for A < 0 also s = max(s, clip_dual A);  loss = -behavior_weight s.  What log_ratio is
    makes the method:
      policy - proximal  decoupled PPO (arXiv 2110.00641 eq. 6), behavior_weight = proximal /
      behavior policy - behavior  PPO as first written, behavior_weight = 1 sequence_log_ratio(...)
      GSPO
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    if clip_dual is not None:
        surrogate = torch.where(
            advantages < 0, torch.maximum(surrogate, clip_dual * advantages), surrogate
        )
    is_clipped_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + clip_high) & (advantages > 0)
    return PolicyLoss(-behavior_weight * surrogate, is_clipped_low, is_clipped_high)


def sequence_log_ratio(log_ratio: Tensor, *, sequences: Sequences) -> Tensor:
    """The log of GSPO's ratio at every token: float32 [R] -> float32 [R].

    Its value is the mean of log_ratio over the sequence's trained tokens, its gradient that of the
    token's own log_ratio (GSPO-token, arXiv 2507.18071 eq. 13-14).  Summed over a sequence with one
    advantage that is the gradient of GSPO itself (eq. 7).
    """
    return sequences.mean(log_ratio.detach()) + (log_ratio - log_ratio.detach())


def cispo_loss(
    policy_logprobs: Tensor,
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """CISPO (arXiv 2506.13585 eq. 4-5): the ratio is a bounded constant, so no token loses its
    gradient.

    all float32 [R].  loss = -behavior_weight stop_gradient(clip(exp(log_ratio), 1 - clip_low, 1 +
    clip_high)) A policy_logprobs.
    """
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(
        -behavior_weight * bounded * advantages * policy_logprobs,
        ratio < 1 - clip_low,
        ratio > 1 + clip_high,
    )


def reinforce_loss(
    policy_logprobs: Tensor, *, advantages: Tensor, behavior_weight: Tensor
) -> PolicyLoss:
    """-behavior_weight A policy_logprobs: float32 [R].  Right for one update per batch only: it
    knows no ratio to the proximal policy.
    """
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return PolicyLoss(-behavior_weight * advantages * policy_logprobs, nowhere, nowhere)


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """0.5 (V - return)^2, or with a clip range the larger of that and the same for V_old + clip(V -
    V_old) (arXiv 1506.02438, PPO code).

    all float32 [R] -> float32 [R].
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
