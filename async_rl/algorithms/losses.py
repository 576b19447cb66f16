"""The losses of policy and critic, per token, and the weights that turn tokens into one number.

Invariant: a loss is `sum(weights * token_loss)` with weights fixed by the whole minibatch, so it may be summed over any
micro-batches, packings and ranks without changing its gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


def token_weights(mask: Tensor, *, sequence_index: Tensor, num_sequences: int, aggregation: Aggregation) -> Tensor:
    """The share of each token in a mean over the masked tokens.

    mask: bool [R]; sequence_index: int64 [R] -> float32 [R], 0 where masked, sum 1 (0 if nothing is trained).
      token_mean     1 / number of trained tokens
      sequence_mean  1 / (number of sequences with a trained token * trained tokens of the token's sequence)
    """
    weight = mask.to(torch.float32)
    if aggregation == "token_mean":
        return weight / weight.sum().clamp(min=1)
    lengths = weight.new_zeros(num_sequences).index_add_(0, sequence_index, weight)
    trained = (lengths > 0).sum().clamp(min=1)
    return weight / (lengths.clamp(min=1)[sequence_index] * trained)


def policy_loss(
    policy_logprobs: Tensor,
    *,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    behavior_weight: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decoupled clipped surrogate of PPO (arXiv 2110.00641 eq. 6), with dual clip (arXiv 1912.09729 eq. 5).

    all float32 [R] -> loss float32 [R], is_clipped_low bool [R], is_clipped_high bool [R].
    With u = exp(policy - proximal):  s = min(u A, clip(u, 1 - clip_low, 1 + clip_high) A);  for A < 0 also s = max(s, clip_dual A);
    loss = -behavior_weight s.  A token is clipped where the bound took its gradient away.
    """
    ratio = (policy_logprobs - proximal_logprobs).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, bounded * advantages)
    if clip_dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, clip_dual * advantages), surrogate)
    is_clipped_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + clip_high) & (advantages > 0)
    return -behavior_weight * surrogate, is_clipped_low, is_clipped_high


def value_loss(values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5 (V - return)^2, or with a clip range the larger of that and the same for V_old + clip(V - V_old) (arXiv 1506.02438, PPO code).

    all float32 [R] -> float32 [R].
    """
    loss = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss
