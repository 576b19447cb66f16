"""Losses of policy and critic per token, the weight of each token in the minibatch, and corrections
for data that a different policy sampled.

The behavior policy differs from the proximal policy because its weights are older, or because the
engine computes differently.
Invariants
- The loss of a minibatch is sum(weight * token_loss), with weights computed from the whole
  minibatch, and every quantity of a sequence is computed from its trained tokens only. So the loss
  may be summed over any micro-batches, packings and ranks with the same gradient.
- A behavior weight is a constant of the loss, without gradient.
Log-probs are in nats; shapes that do not match raise RuntimeError in torch.
"""

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


BehaviorCorrection = Literal["none", "token_tis", "token_mis", "sequence_tis", "sequence_mis"]

# Bound on the logarithm of a sequence's weight. It is far above every useful cap, and the square of
# exp(30), which the effective sample size needs, is still a float32.
_MAX_LOG = 30.0


class BehaviorWeights(NamedTuple):
    """The weights of R tokens.

    weights: float32 [R], as applied; raw: float32 [R], before the bounds; is_bounded: bool [R],
    tokens whose weight a bound changed.
    """

    weights: Tensor
    raw: Tensor
    is_bounded: Tensor


def behavior_weights(
    log_ratio: Tensor,
    *,
    sequences: Parts,
    correction: BehaviorCorrection,
    maximum: float,
    minimum: float,
) -> BehaviorWeights:
    """Compute exp(proximal - behavior) per token or per sequence, within bounds.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens -> float32 [R], float32 [R], bool [R].  With w_t the weight of
    a token and w_s the product of w_t over the trained tokens of its sequence s:
      none          1
      token_tis     min(w_t, maximum)                          truncated importance sampling
      token_mis     w_t if minimum <= w_t <= maximum, else 0   masked importance sampling
                                                               (IcePop, arXiv 2510.18855)
      sequence_tis  min(w_s, maximum)
      sequence_mis  w_s if minimum <= w_s <= maximum, else 0
    """
    log_ratio = log_ratio.detach()
    if correction.startswith("sequence"):
        log_ratio = sequences.total(log_ratio).clamp(-_MAX_LOG, _MAX_LOG)
    raw = log_ratio.exp()
    if correction == "none":
        return BehaviorWeights(torch.ones_like(raw), raw, torch.zeros_like(raw, dtype=torch.bool))
    if correction.endswith("tis"):
        return BehaviorWeights(raw.clamp(max=maximum), raw, raw > maximum)
    is_outside = (raw > maximum) | (raw < minimum)
    return BehaviorWeights(torch.where(is_outside, 0.0, raw), raw, is_outside)


# A rare token that the policy now prefers would otherwise make a statistic by itself.
_MOST_COUNTED = 5.0


def counted(log_ratio: Tensor) -> Tensor:
    """Return how much each token counts in a statistic of the policy: min(exp(log_ratio), 5).

    log_ratio: float32 [R], proximal - behavior log-probs -> float32 [R], without gradient.  A mean
    over sampled tokens with these weights is one over tokens of the proximal policy (truncated
    importance sampling, Ionides 2008): a token that older weights sampled and that the policy has
    left counts as often as the policy would sample it, whatever the loss does with it.
    """
    return log_ratio.detach().exp().clamp(max=_MOST_COUNTED)


def dppo_loss(
    policy_logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, max_shift: float
) -> PolicyLoss:
    """Compute the loss of DPPO with the binary total variation (arXiv 2602.04879).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs
    -> float32 [R], bool [R], bool [R].  With u = exp(log_ratio), p and q the probabilities of the
    token under the policy and the behavior policy:
      loss = -stop_gradient(min(u, 20)) A policy_logprobs
    and 0 where A > 0 and p - q > max_shift, or A <= 0 and q - p > max_shift.  The trust region
    bounds probabilities, so a rare token may multiply its own.
    """
    ratio = log_ratio.detach().exp()
    probability = policy_logprobs.detach().exp()
    shift = probability - (policy_logprobs - log_ratio).detach().exp()
    is_high = (shift > max_shift) & (advantages > 0)
    is_low = (shift < -max_shift) & (advantages <= 0)
    # Cut off far outside the trust region, as in the published code.
    loss = -ratio.clamp(max=20.0) * advantages * policy_logprobs
    return PolicyLoss(loss.masked_fill(is_low | is_high, 0.0), is_low, is_high)


def vespo_loss(
    policy_logprobs: Tensor,
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    sequences: Parts,
) -> PolicyLoss:
    """Compute the loss of VESPO (arXiv 2602.10693).

    policy_logprobs, log_ratio, advantages: float32 [R], log_ratio = policy - behavior log-probs
    -> float32 [R], bool [R], bool [R].  With W the product of exp(log_ratio) over the trained
    tokens of the sequence, and k and lambda by the sign of the advantage (0 counts as positive):
      phi(W) = W^k exp(lambda (1 - W))
      loss = -stop_gradient(phi(W)) A policy_logprobs
    phi(1) = 1, and phi falls to 0 for small and large W without a jump.
    """
    # Bounds from the published code. Above the upper one the weight of the loss is 0, and its
    # exponential is still a float32.
    log_weight = sequences.total(log_ratio.detach()).clamp(-18.42, 20.0)
    is_positive = advantages >= 0
    # The powers and decays as published.
    k = torch.where(is_positive, 2.0, 3.0)
    rate = torch.where(is_positive, 3.0, 2.0)
    phi = (k * log_weight + rate * (1 - log_weight.exp())).exp()
    is_clipped = torch.zeros_like(is_positive)
    return PolicyLoss(-phi * advantages * policy_logprobs, is_clipped, is_clipped)


def effective_sequences(log_ratio: Tensor, *, sequences: Parts) -> float:
    """Return the effective sample size of the weights of whole sequences, as a share of them.

    log_ratio: float32 [R], proximal - behavior log-probs; sequences: the sequences of the R tokens,
    whose mask is the trained tokens -> (sum w)^2 / (S sum w^2) in (0, 1], with w the product of
    exp(log_ratio) over the trained tokens of each of the S sequences that have any; 1 for S = 0
    (Kish 1965; VCPO, arXiv 2602.17616, uses it as a measure of the noise of a batch).
    """
    has_token = sequences.sums(torch.ones_like(log_ratio)) > 0
    logs = sequences.sums(log_ratio.detach())[has_token]
    if not len(logs):
        return 1.0
    # A common factor of all weights cancels, so the largest may be 1.
    weights = (logs - logs.max()).exp()
    return float(weights.sum().square() / (len(logs) * weights.square().sum()))
