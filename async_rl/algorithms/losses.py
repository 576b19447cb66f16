"""Losses of policy and critic per token, and the weight of each token in the minibatch.

Invariant: the loss of a minibatch is sum(weight * token_loss), with weights computed from the whole
minibatch. So it may be summed over any micro-batches, packings and ranks with the same gradient.
Log-probs are in nats; shapes that do not match raise RuntimeError in torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms.parts import Parts

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


class PolicyLoss(NamedTuple):
    """The loss of R tokens.

    loss: float32 [R]; is_clipped_low, is_clipped_high: bool [R], tokens whose ratio was bounded at
    that side.
    """

    loss: Tensor
    is_clipped_low: Tensor
    is_clipped_high: Tensor


def token_weights(
    sequences: Parts, *, aggregation: Aggregation, constant_tokens: int | None
) -> Tensor:
    """Return the weight of each token in the minibatch's loss.

    sequences: the sequences of R tokens, whose mask is the trained tokens of the minibatch
    -> float32 [R], 0 where masked.  With S the number of sequences with a trained token:
      token_mean     1 / number of trained tokens
      sequence_mean  1 / (S * trained tokens of the token's sequence)
      sequence_sum   1 / (S * constant_tokens)    Dr. GRPO, arXiv 2503.20783 sec. 3.1: no bias
                                                  towards short answers
    Raises ValueError for sequence_sum without constant_tokens.
    """
    weight = sequences.mask.to(torch.float32)
    if aggregation == "token_mean":
        return weight / sequences.across.sum(sequences.mask.sum()).clamp(min=1)
    lengths = sequences.sums(weight).float()
    # Sequences without a trained token would lower the mean without having a loss.
    num_trained = (lengths > 0).sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return weight / (lengths.clamp(min=1)[sequences.index] * num_trained)
    if constant_tokens is None:
        raise ValueError("sequence_sum needs constant_tokens")
    return weight / (constant_tokens * num_trained)


def clipped_loss(
    log_ratio: Tensor,
    *,
    advantages: Tensor,
    behavior_weight: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> PolicyLoss:
    """Compute the clipped surrogate loss of PPO (arXiv 1707.06347 eq. 7).

    log_ratio, advantages, behavior_weight: float32 [R] -> float32 [R], bool [R], bool [R].
    With u = exp(log_ratio):
      s = min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)
      s = max(s, clip_dual A) where A < 0 and clip_dual is set    dual clip, arXiv 1912.09729 eq. 5
      loss = -behavior_weight s
    log_ratio selects the method:
      policy - proximal        decoupled PPO (arXiv 2110.00641 eq. 6), behavior_weight = proximal /
                               behavior
      policy - behavior        PPO as first published, behavior_weight = 1
      sequence_log_ratio(...)  GSPO
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    # The minimum is pessimistic: a clip never makes a step look better than it is.
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    if clip_dual is not None:
        limited = torch.maximum(surrogate, clip_dual * advantages)
        surrogate = torch.where(advantages < 0, limited, surrogate)
    is_clipped_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + clip_high) & (advantages > 0)
    return PolicyLoss(-behavior_weight * surrogate, is_clipped_low, is_clipped_high)


def sequence_log_ratio(log_ratio: Tensor, *, sequences: Parts) -> Tensor:
    """Return the logarithm of GSPO's ratio at every token: float32 [R] -> float32 [R].

    Its value is the mean of log_ratio over the trained tokens of the sequence, its gradient is
    the gradient of the token's log_ratio (GSPO-token, arXiv 2507.18071 eq. 13-14).  Summed over a
    sequence with one advantage that is the gradient of GSPO (eq. 7).
    """
    detached = log_ratio.detach()
    return sequences.mean(detached) + (log_ratio - detached)


def cispo_loss(
    policy_logprobs: Tensor,
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    clip_low: float | None,
    clip_high: float,
) -> PolicyLoss:
    """Compute the loss of CISPO (arXiv 2506.13585 eq. 4-5).

    policy_logprobs, log_ratio, advantages, behavior_weight: float32 [R]
    -> float32 [R], bool [R], bool [R].  With u = exp(log_ratio):
      loss = -behavior_weight stop_gradient(clip(u, 1 - clip_low, 1 + clip_high)) A policy_logprobs
    The bounded ratio is a constant, so no token loses its gradient.  clip_low=None is the published
    setting, without a lower bound.
    """
    ratio = log_ratio.detach().exp()
    # A ratio is positive, so 0 does not bound it.
    least = 0.0 if clip_low is None else 1 - clip_low
    bounded = ratio.clamp(least, 1 + clip_high)
    loss = -behavior_weight * bounded * advantages * policy_logprobs
    return PolicyLoss(loss, ratio < least, ratio > 1 + clip_high)


def reinforce_loss(
    policy_logprobs: Tensor, *, advantages: Tensor, behavior_weight: Tensor
) -> PolicyLoss:
    """Compute the loss of REINFORCE (Williams 1992): -behavior_weight A policy_logprobs.

    policy_logprobs, advantages, behavior_weight: float32 [R] -> float32 [R], and two bool [R] that
    are False, because nothing is clipped.  It has no ratio to the proximal policy, so it is correct
    only for one update per batch.
    """
    is_clipped = torch.zeros_like(advantages, dtype=torch.bool)
    return PolicyLoss(-behavior_weight * advantages * policy_logprobs, is_clipped, is_clipped)


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Compute the loss of the critic at each token.

    values, old_values, returns: float32 [R] -> float32 [R].  0.5 (V - return)^2; with a clip range
    the larger of that and 0.5 (V_old + clip(V - V_old, -clip, clip) - return)^2
    (arXiv 1506.02438; the clipped form is from the published code of PPO).
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        # The larger loss: the clip must not hide that a value moved away from its return.
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
